// Runs functions that call a client, and writes what each returned or raised as JSON, as calls.py does.
import { writeFileSync } from "node:fs";

// The server that the program was started with: `url` without /v1, `base_url` with it, `model` and `key`.
export const server = JSON.parse(process.argv[2]);

// Calls each function of `calls` and writes the results under the functions' names.
export async function run(calls) {
  const results = {};
  for (const [name, call] of Object.entries(calls)) {
    try {
      results[name] = { returned: await call() };
    } catch (error) {
      results[name] = { raised: error.stack ?? String(error) };
    }
  }
  writeFileSync(process.argv[3], JSON.stringify(results));
}
