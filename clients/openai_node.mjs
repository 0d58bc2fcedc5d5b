// One call of OpenAI's client for Node, named on the command line; prints what came back, or the error, as JSON.
import OpenAI from "openai";

const [call, baseURL, apiKey, body] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const asked = JSON.parse(body);

async function all(pages) {
  const found = [];
  for await (const one of await pages) found.push(one);
  return found;
}

const calls = {
  "completion": () => client.completions.create(asked),
  "completion stream": () => all(client.completions.create({ ...asked, stream: true })),
  "chat": () => client.chat.completions.create(asked),
  "chat stream": () => all(client.chat.completions.create({ ...asked, stream: true })),
  "chat helper": () => client.chat.completions.stream(asked).finalContent(),
  "models": () => all(client.models.list()),
  "model": () => client.models.retrieve(asked.model),
};

try {
  console.log(JSON.stringify(await calls[call]()));
} catch (error) {
  if (!(error instanceof OpenAI.APIError)) throw error;
  const { status, code, param, message } = error;
  console.log(JSON.stringify({ error: { name: error.constructor.name, status, code, param, message } }));
}
