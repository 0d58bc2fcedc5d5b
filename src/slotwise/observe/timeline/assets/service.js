// The service behind this page: its events, its scheduler, and the key to its door.
const KEY = "slotwise-key";
const PAUSES = [500, 1000, 2000, 5000]; // milliseconds before the next attempt

export class Service {
  // `onKey` is asked for a key when one is needed: a promise of it.
  constructor(onKey) {
    this.onKey = onKey;
    this.key = sessionStorage.getItem(KEY) ?? "";
  }

  async fetch(path, { method = "GET", body, signal } = {}) {
    for (;;) {
      const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
      if (body !== undefined) headers["Content-Type"] = "application/json";
      const keepalive = method === "PUT"; // it is sent even if the page is left
      const sent = { method, headers, body: body && JSON.stringify(body), cache: "no-store", signal, keepalive };
      const response = await fetch(path, sent);
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

  // Follow the events for ever.  `onOpen` is called before the first of each connection, `onState` with one word.
  async follow(onOpen, onEntries, onState) {
    for (let failures = 0; ; failures++) {
      try {
        const response = await this.fetch("/events");
        if (!response.ok) throw new Error(`/events answered ${response.status}`);
        onOpen();
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

// JSON lines of a stream, as many at a time as have come.
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

// A log that came with the page: gzip, in base64.
export function packed(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (sign) => sign.charCodeAt(0));
  return new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
}
