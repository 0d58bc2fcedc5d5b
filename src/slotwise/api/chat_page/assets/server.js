// What the page knows of its server: the models, the load of others, and whether it sleeps.
import { $, button, make, plural } from "./dom.js";
import { addressOf, Service } from "./service.js";
import { errorOf } from "./stream.js";

const TICK = 1000; // milliseconds between two looks while an answer arrives
const RARELY = 3; // ticks between two looks else
const SQUARES = 16; // slots drawn one by one; of more, a share is drawn

export class Server {
  constructor() {
    let question = null; // the open request for a key: one at a time
    this.service = new Service((wrong) => question ??= askForKey(wrong).finally(() => { question = null; }));
    this.models = [];
    this.own = this.begun = 0; // requests of this page under way, and those of them with a first token
    this.state = ""; // of /health
    this.onChange = () => {};
  }

  get isRouter() { return document.documentElement.dataset.router !== ""; }

  // Reads the models: the served one by its first name, and its adapters.
  async loadModels() {
    const { data } = await this.service.json("/v1/models");
    const [first] = data;
    this.models = data.filter((one) => one === first || one.parent);
  }

  // Looks at the load and the state, again and again, while the page is seen.
  async watch() {
    for (let tick = 0; ; tick++) {
      if (!document.hidden && (this.own || tick % RARELY === 0)) await this.look();
      await new Promise((done) => setTimeout(done, TICK));
    }
  }

  async look() {
    const health = await this.#get("/health");
    let state = health === null ? "away" : health.status;
    if (state === "unavailable" && this.isRouter && await this.#replicasSleep()) state = "asleep";
    this.why = health?.error?.message ?? "";
    if (state !== this.state) {
      const before = this.state;
      this.state = state;
      this.onChange(state, before);
    }
    this.#showLoad(state === "ok" && this.models.length ? await this.#get("/load") : null);
  }

  async #replicasSleep() {
    const found = await this.#get("/is_sleeping");
    return Object.values(found?.replicas ?? {}).some((one) => one.is_sleeping);
  }

  // Polling the load must not prompt for a key: without one the load stays unknown.
  async #get(path) {
    const { key } = this.service;
    try {
      const response = await fetch(addressOf(path), {
        cache: "no-store", headers: key ? { Authorization: `Bearer ${key}` } : {} });
      return response.status === 401 ? {} : await response.json();
    } catch {
      return null;
    }
  }

  // Shows the slots: this page's, others', and what waits.  Of others' requests there is nothing but their number.
  #showLoad(load) {
    const slots = load?.max_num_seqs;
    $("load").hidden = !slots;
    if (!slots) return;
    const { num_requests_running: running, num_requests_waiting: waiting } = load;
    const own = Math.min(running, waiting ? this.begun : this.own), others = running - own;
    const drawn = Math.min(slots, SQUARES), scale = drawn / slots;
    const filled = Math.ceil(running * scale), mine = Math.min(filled, Math.ceil(own * scale));
    $("slots").replaceChildren(...Array.from({ length: drawn }, (_, index) =>
      make("i", { className: index < mine ? "own" : index < filled ? "other" : "" })));
    const queue = Math.max(0, waiting - (this.own - own));
    const busy = others || queue
      ? `${plural(others, "other request")} running${queue ? `, ${queue} waiting` : ""}` : own ? "only yours" : "idle";
    $("busy").textContent = busy;
    $("load").title = `${running} of ${plural(slots, "slot")} taken, ${waiting} waiting`;
  }

  // Wakes the model up.  Asks for the admin key where this page's does not open it.
  async wake(adminKey = "") {
    const key = adminKey || this.service.key;
    const response = await fetch(addressOf("/wake_up"), {
      method: "POST", headers: key ? { Authorization: `Bearer ${key}` } : {} });
    if (!response.ok) throw await errorOf(response);
    await this.look();
  }

  // Whether this page may change how the server works, with the key that it has.
  async mayAdminister() {
    const { key } = this.service;
    const response = await fetch(addressOf("/admin/scheduling"), {
      cache: "no-store", headers: key ? { Authorization: `Bearer ${key}` } : {} });
    return response.ok || response.status >= 500; // a sleeping server may not know its scheduling
  }
}

export function askForKey(wrong, title = "This server asks for a key") {
  $("doortitle").textContent = title;
  $("wrong").hidden = !wrong;
  $("key").value = "";
  $("door").returnValue = "";
  $("door").showModal();
  return new Promise((done, failed) => $("door").addEventListener("close", () => {
    if ($("key").value) done($("key").value);
    else failed(new Error("a key is needed"));
  }, { once: true }));
}

const STATES = {
  away: ["The server does not answer.", "It is asked again every few seconds."],
  unavailable: ["The server takes no requests.", ""],
  draining: ["The server is shutting down.", ""],
};

// Says in the notice why nothing can be sent, and offers to wake a sleeping model to a client that may.
export async function showState(server) {
  const notice = $("notice"), { state } = server;
  notice.hidden = state === "ok";
  if (state === "ok") return;
  if (state !== "asleep") {
    const [words, more] = STATES[state] ?? STATES.unavailable;
    notice.replaceChildren(make("strong", { textContent: words }), ` ${server.why || more}`);
    return;
  }
  const said = make("span", {});
  const waking = (act) => button("Wake it up", async ({ currentTarget }) => {
    currentTarget.disabled = true;
    said.textContent = " Waking it up…";
    try {
      await act();
    } catch (error) {
      said.textContent = ` ${error.message}`;
      currentTarget.disabled = false;
    }
  }, { className: "main", testid: "wake" });
  const may = await server.mayAdminister().catch(() => false);
  const act = may ? waking(() => server.wake())
    : waking(async () => server.wake(await askForKey(false, "Waking the model needs the admin key")));
  notice.replaceChildren(make("strong", { textContent: "No model is loaded: it sleeps." }),
    may ? " " : " Waking it needs the admin key. ", act, said);
}
