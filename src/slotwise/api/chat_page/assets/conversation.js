// The conversation on the page: what is sent, what arrives, and what is kept.
import { AnswerView, editing, questionShown } from "./answer.js";
import { $ } from "./dom.js";
import { Stopwatch } from "./facts.js";
import { newConversation, randomName, store, titleOf } from "./store.js";
import { generated } from "./stream.js";

const NEAR = 60; // pixels from the end within which the page follows an answer
const PATIENCE = 700; // milliseconds without a token after which the page asks for the queue position
const EVERY = 250; // milliseconds between two updates of the numbers of an answer that arrives
const ABORTED = 2000; // milliseconds that the server has to end a stopped answer; then the connection is closed
const SPOKEN = 2000; // characters of an answer that a screen reader is given
const NUMBERS = 4; // of a vector, shown
const PATHS = { chat: "/v1/chat/completions", completion: "/v1/completions" };

export class Talk {
  // `onKept` is called when the list of conversations changed.
  constructor(server, settings, panel, onKept) {
    Object.assign(this, { server, settings, panel, onKept });
    this.mode = "chat";
    this.model = ""; // the name that requests have
    this.running = null; // {id, abort} of the answer that arrives
    this.last = null; // the view of the last answer
    this.following = true; // the end of the conversation
    $("scroll").addEventListener("scroll", () => this.#showLatest());
    new ResizeObserver(() => this.#follow()).observe($("scroll"));
  }

  // Shows a conversation; null: a new one.
  open(conversation) {
    this.#leave();
    this.conversation = conversation ?? newConversation(this.mode, this.settings.system);
    if (conversation) this.onMode?.(conversation.mode);
    if (this.turns.at(-1)?.role === "user") {
      this.turns.push({ role: "assistant", content: "", mode: this.mode, error: "The page was closed before its answer." });
    }
    $("system").value = this.conversation.system;
    this.#show();
    this.onKept();
  }

  set system(text) { this.conversation.system = text; }
  get turns() { return this.conversation.turns; }

  // Sends a message, and receives the answer.
  async send(text) {
    if (this.running) return;
    this.turns.push({ role: "user", content: text });
    this.conversation.title ||= titleOf(text);
    this.conversation.mode = this.mode;
    $("turns").append(this.#question(this.turns.at(-1)));
    this.#started(true);
    await this.#answer();
  }

  // Ends the answer that arrives; what there is of it stays.
  stop() {
    const { running } = this;
    if (!running || running.stopped) return;
    running.stopped = true;
    this.server.service.fetch("/abort_requests", { method: "POST", body: { request_ids: [running.id] } }).catch(() => {});
    setTimeout(() => running.abort.abort(), ABORTED);
  }

  // Leaves an answer that arrives, for another conversation.
  #leave() {
    const { running } = this;
    if (!running) return;
    running.stopped = true;
    running.abort.abort();
    this.running = null;
    this.onBusy?.(false);
  }

  #retry(turn) {
    if (this.running) return;
    this.turns.splice(this.turns.indexOf(turn));
    this.#show();
    this.#answer();
  }

  #edit(turn, shown) {
    if (this.running) return;
    editing(shown, turn.content, (text) => {
      if (text === null) return this.#show();
      this.turns.splice(this.turns.indexOf(turn));
      this.#show();
      this.send(text);
    });
  }

  // Sends what the tools of an answer returned.
  #results(turn) {
    if (this.running) return;
    for (const call of turn.calls) this.turns.push({ role: "tool", callId: call.id, content: call.result });
    this.#answer();
  }

  get #actions() {
    return {
      onRetry: (turn) => this.#retry(turn),
      onSlots: (facts) => this.panel.show(facts),
      onExplain: ({ id }) => this.server.service.json(`/explain/${encodeURIComponent(id)}`),
      onResults: (turn) => this.#results(turn),
    };
  }

  // Puts all turns on the page.
  #show() {
    const shown = this.turns.filter(({ role }) => role !== "tool").map((turn) => {
      if (turn.role === "user") return this.#question(turn);
      this.last = AnswerView.whole(turn, this.#actions, () => this.#follow());
      return this.last.element;
    });
    $("turns").replaceChildren(...shown);
    this.#started(shown.length > 0);
    this.#toEnd();
  }

  #question(turn) {
    const question = questionShown(turn, { onEdit: () => this.#edit(turn, question) });
    return question;
  }

  #started(hasTurns) {
    $("empty").hidden = hasTurns;
    document.body.classList.toggle("fresh", !hasTurns);
  }

  async #answer() {
    this.#keep(this.conversation);
    const turn = { role: "assistant", content: "", mode: this.mode };
    const view = this.last = new AnswerView(turn, this.#actions, () => this.#follow());
    const running = this.running = { id: randomName(), abort: new AbortController(), stopped: false };
    this.turns.push(turn);
    $("turns").append(view.element);
    view.busy("…");
    this.#toEnd();
    this.server.own += 1;
    this.server.look();
    this.onBusy?.(true);
    $("spoken").textContent = "The answer is being written.";
    const { conversation } = this, watch = new Stopwatch();
    try {
      if (this.mode === "embedding") await this.#embed(turn, running, watch);
      else await this.#generate(turn, view, running, watch);
    } catch (error) {
      if (!running.stopped) turn.error = error.message;
      if (error.code === "model_not_found") this.onModelGone?.(); // another one is served
    }
    this.server.own -= 1;
    this.server.begun = 0;
    const has = turn.content || turn.reasoning || turn.calls || turn.vectors;
    if (!has) turn.error ||= running.stopped ? "Stopped before its first token." : "The answer is empty.";
    view.finish();
    this.#keep(conversation);
    if (this.running !== running) return; // another conversation is shown
    this.running = null;
    this.onBusy?.(false);
    $("spoken").textContent = turn.error || `The answer: ${turn.content.slice(0, SPOKEN)}`;
    this.server.look();
    this.#follow();
  }

  async #generate(turn, view, running, watch) {
    const waiting = setTimeout(() => this.#showPosition(view, running, watch), PATIENCE);
    const before = { id: "", model: this.model, finish: "", replica: "" };
    let usage = null, shown = 0;
    try {
      for await (const event of generated(this.server.service, PATHS[this.mode], this.#body(running.id), running.abort.signal)) {
        usage = event.usage ?? usage;
        watch.mark(usage?.completion_tokens ?? 0);
        this.server.begun = Number(watch.first > 0);
        before.finish = event.finish || before.finish;
        before.replica = event.replica;
        if (!before.id) {
          before.id = event.id;
          this.panel.point(before);
          this.server.look(); // now it has a slot
        }
        view.apply(event);
        if (performance.now() - shown > EVERY) {
          shown = performance.now();
          view.showNumbers(watch.facts(usage));
        }
      }
    } finally {
      clearTimeout(waiting);
      if (running.stopped) before.finish = "abort";
      turn.facts = { ...before, ...watch.facts(usage) };
    }
  }

  // Says how many requests are before one that waits.
  async #showPosition(view, running, watch) {
    while (this.running === running && !watch.first) {
      const found = await this.server.service.json(`/requests/${running.id}`).catch(() => null);
      const [request] = found?.requests ?? [];
      if (this.running !== running || watch.first) return;
      const ahead = request?.queue_position, start = request?.estimated_start_s;
      view.status.textContent = typeof ahead === "number"
        ? `Waiting for a slot: ${ahead ? `${ahead} ahead` : "next"}${start ? `, about ${Math.ceil(start)} s` : ""}` : "Reading the prompt…";
      await new Promise((done) => setTimeout(done, PATIENCE));
    }
  }

  #body(id) {
    const body = { model: this.model || undefined, request_id: id, ...this.settings.sampling(this.mode) };
    if (this.mode === "completion") {
      const question = this.turns.findLast(({ role }) => role === "user");
      return { ...body, prompt: question.content };
    }
    return { ...body, messages: this.#messages(), ...this.settings.tools() };
  }

  #messages() {
    const { system } = this.conversation;
    const messages = system.trim() ? [{ role: "system", content: system }] : [];
    for (const turn of this.turns.slice(0, -1)) {
      if (turn.role === "user") messages.push({ role: "user", content: turn.content });
      else if (turn.role === "tool") messages.push({ role: "tool", tool_call_id: turn.callId, content: turn.content });
      else if (turn.calls?.length) {
        const calls = turn.calls.map((call) => ({
          id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
        messages.push({ role: "assistant", content: turn.content, tool_calls: calls });
      } else if (turn.content) messages.push({ role: "assistant", content: turn.content });
    }
    return messages;
  }

  async #embed(turn, running, watch) {
    const question = this.turns.findLast(({ role }) => role === "user");
    const inputs = question.content.split("\n").map((line) => line.trim()).filter(Boolean);
    const { data, id, usage } = await this.server.service.json("/v1/embeddings", {
      method: "POST", signal: running.abort.signal, body: { model: this.model || undefined, input: inputs, request_id: running.id } });
    const vectors = data.map(({ embedding }) => embedding);
    turn.vectors = {
      inputs, dimensions: vectors[0].length, begins: vectors[0].slice(0, NUMBERS).map((one) => Number(one.toFixed(NUMBERS))),
      similarities: vectors.map((one) => vectors.map((other) => cosine(one, other))) };
    turn.facts = { id, model: this.model, finish: "", ...watch.facts({ ...usage, completion_tokens: 0 }), ttft: null };
  }

  #keep(conversation) {
    conversation.updated = Date.now();
    if (!store.save(conversation)) {
      $("spoken").textContent = "This conversation is too long to be kept.";
      this.onFull?.();
    }
    this.onKept();
  }

  // -- where the page is scrolled to -----------------------------------------------------------------------------

  get #isAtEnd() {
    const { scrollTop, clientHeight, scrollHeight } = $("scroll");
    return scrollHeight - scrollTop - clientHeight < NEAR;
  }

  #follow() {
    if (this.following) this.#toEnd();
    else this.#showLatest();
  }

  #toEnd() {
    this.following = true;
    $("scroll").scrollTop = $("scroll").scrollHeight;
    $("latest").hidden = true;
  }

  // The reader's own scrolling ends the following, and takes it up again at the end.
  #showLatest() {
    this.following = this.#isAtEnd;
    $("latest").hidden = this.following;
  }

  toEnd() { this.#toEnd(); }
}

function cosine(one, other) {
  let product = 0, own = 0, others = 0;
  one.forEach((value, index) => {
    product += value * other[index];
    own += value * value;
    others += other[index] * other[index];
  });
  return product / Math.sqrt(own * others || 1);
}
