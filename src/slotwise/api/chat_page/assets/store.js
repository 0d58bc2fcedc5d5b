// Conversations, kept in this browser only: each under a key of its own, so that two tabs do not overwrite each other's.
//
// A conversation is {id, title, mode, updated, system, turns}; a turn is {role: "user", content}, an answer
// {role: "assistant", content, reasoning, calls, facts, error}, or what a tool said {role: "tool", callId, content}.
const PREFIX = "slotwise-chat-";
const SETTINGS = "slotwise-chat-settings"; // not a conversation
const MOST = 100; // conversations
const ROOM = 2_000_000; // characters of all of them; browsers keep about five million of a site
const TITLE = 60; // characters

export const store = {
  // All conversations, the latest first, without their turns.
  list() {
    return this.keys().map((key) => this.read(key)).filter(Boolean)
      .sort((one, other) => other.updated - one.updated)
      .map(({ id, title, updated }) => ({ id, title, updated }));
  },

  keys() { return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX) && key !== SETTINGS); },

  read(key) {
    try {
      const found = JSON.parse(localStorage.getItem(key));
      return Array.isArray(found?.turns) && typeof found.id === "string" ? found : null;
    } catch {
      return null; // another program wrote it
    }
  },

  load(id) { return this.read(PREFIX + id); },

  // Saves a conversation; the oldest others go where there is no room.  Returns whether it was saved.
  save(conversation) {
    const text = JSON.stringify(conversation), own = PREFIX + conversation.id;
    if (text.length > ROOM) return false;
    const others = this.keys().filter((key) => key !== own).map((key) => [key, this.read(key)?.updated ?? 0])
      .sort(([, one], [, other]) => one - other).map(([key]) => key);
    const size = () => others.reduce((sum, key) => sum + localStorage.getItem(key).length, text.length);
    while (others.length && (others.length >= MOST || size() > ROOM)) localStorage.removeItem(others.shift());
    for (;;) {
      try {
        localStorage.setItem(own, text);
        return true;
      } catch { // other pages of this address filled what the browser allows
        if (!others.length) return false;
        localStorage.removeItem(others.shift());
      }
    }
  },

  remove(id) { localStorage.removeItem(PREFIX + id); },
  clear() { for (const key of this.keys()) localStorage.removeItem(key); },

  get settings() {
    try {
      return JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
    } catch {
      return {};
    }
  },

  set settings(value) {
    try {
      localStorage.setItem(SETTINGS, JSON.stringify(value));
    } catch { /* full: they hold until the page is closed */ }
  },
};

export function newConversation(mode, system) {
  return { id: randomName(), title: "", mode, updated: Date.now(), system, turns: [] };
}

export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > TITLE ? `${line.slice(0, TITLE - 1)}…` : line;
}

// A name that cannot be guessed.  `crypto.randomUUID` exists on https and localhost only.
export function randomName() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (one) => one.toString(16).padStart(2, "0")).join("");
}
