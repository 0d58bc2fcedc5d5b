// The service of this page: its events, its scheduling settings, and its API key.
const KEY = "slotwise-key";
const PAUSES = [500, 1000, 2000, 5000]; // milliseconds before each next attempt

// Returns the address of a path: beside this page, perhaps below a proxy's prefix, which the page may know.
export function addressOf(path) {
  const { root } = document.documentElement.dataset;
  return root ? root + path : path.slice(1);
}

export class Service {
  // `onKey` is called when a key is needed and returns a promise of it.
  constructor(onKey) {
    this.onKey = onKey;
    this.key = sessionStorage.getItem(KEY) ?? "";
    this.replica = ""; // the one behind a router that this page shows; "": it was loaded from a server itself
  }

  async fetch(path, { method = "GET", body, signal } = {}) {
    for (;;) {
      const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
      if (body !== undefined) headers["Content-Type"] = "application/json";
      const keepalive = method === "PUT"; // sent even if the page is closed
      const sent = { method, headers, body: body && JSON.stringify(body), cache: "no-store", signal, keepalive };
      const named = this.replica && `?${new URLSearchParams({ replica: this.replica })}`;
      const response = await fetch(addressOf(path) + named, sent);
      if (response.status !== 401) return response;
      this.key = await this.onKey(this.key !== "");
      sessionStorage.setItem(KEY, this.key);
    }
  }

  async json(path, options) {
    const response = await this.fetch(path, options);
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error?.message ?? `${path} answered ${response.status}`);
    return answer;
  }

  // Follows the events without end.  `onOpen` is called before the first of each connection, with the server's date in
  // milliseconds; `onState` with one word.
  async follow(onOpen, onEntries, onState) {
    for (let failures = 0; ; failures++) {
      try {
        const response = await this.fetch("/events");
        if (!response.ok) throw new Error(`/events answered ${response.status}`);
        onOpen(Date.parse(response.headers.get("date")) || Date.now());
        onState("live");
        failures = 0;
        await readLines(response.body, onEntries);
      } catch (error) {
        console.debug(error);
      }
      onState("away");
      await new Promise((done) => setTimeout(done, PAUSES[Math.min(failures, PAUSES.length - 1)]));
    }
  }
}

// Reads the JSON lines of a stream; passes on as many at a time as have arrived.
export async function readLines(stream, onEntries) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + (value ?? "")).split("\n");
    rest = done ? "" : lines.pop();
    const entries = lines.filter((line) => line.trim()).map((line) => JSON.parse(line));
    if (entries.length) onEntries(entries);
    if (done) return;
  }
}

// Returns the stream of a log embedded in the page: gzip, in base64.
export function packed(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (sign) => sign.charCodeAt(0));
  return new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
}
