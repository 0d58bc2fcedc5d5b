// The turns of a conversation on the page.
import { button, copyFrom, make, plural } from "./dom.js";
import { explanationShown, factsShown } from "./facts.js";
import { Rendering } from "./markdown.js";

const SHOWN = 60; // characters of a call's arguments in its summary
const DECIMALS = 3;

export function questionShown(turn, { onEdit }) {
  const text = make("div", { className: "text", dir: "auto", textContent: turn.content });
  const copy = button("Copy", () => copyFrom(copy, turn.content), { className: "quiet", testid: "copy-question" });
  const edit = button("Edit", onEdit, { className: "quiet", testid: "edit", title: "Edit, and drop what follows" });
  const actions = make("div", { className: "actions" }, edit, copy);
  return make("article", { className: "question", testid: "question", label: "You" }, text, actions);
}

// Replaces a question by a field with its text.  `onDone` receives the new text, or null where it stays.
export function editing(shown, text, onDone) {
  const field = make("textarea", { value: text, label: "Your message", testid: "edit-field" });
  const send = button("Send", () => field.value.trim() && onDone(field.value), { className: "main", testid: "edit-send" });
  const cancel = button("Cancel", () => onDone(null));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") onDone(null);
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send.click();
    } else return;
    event.stopPropagation();
  });
  shown.replaceChildren(field, make("div", { className: "actions" }, send, cancel));
  shown.classList.add("edited");
  field.focus();
}

// An answer.  `onExplain` and `onSlots` receive its facts, `onResults` what its tools returned.
export class AnswerView {
  constructor(turn, actions, onDrawn = () => {}) {
    this.turn = turn;
    this.actions = actions;
    this.onDrawn = onDrawn;
    this.body = make("div", { className: "body", dir: "auto" });
    this.calls = make("div", { className: "calls" });
    this.status = make("p", { className: "waiting" });
    this.numbers = make("span", { className: "numbers" });
    this.facts = make("div", { className: "facts", testid: "facts" }, this.numbers);
    this.explanation = make("div", { className: "explanation", testid: "explanation", hidden: true });
    this.explanation.setAttribute("role", "status");
    this.reasoning = null;
    this.element = make("article", { className: "answer", testid: "answer", label: "Answer" },
      this.body, this.calls, this.status, this.facts, this.explanation);
  }

  get isPlain() { return this.turn.mode !== "chat"; }

  // Shows an answer that is complete.
  static whole(turn, actions, onDrawn) {
    const view = new AnswerView(turn, actions, onDrawn);
    if (turn.reasoning) view.#addReasoning(turn.reasoning);
    if (turn.content) view.#addText(turn.content);
    view.#showCalls();
    view.finish();
    return view;
  }

  // Adds what an event of the stream says.
  apply({ content, reasoning, calls }) {
    const { turn } = this;
    if (content || reasoning || calls.length) this.status.textContent = "";
    if (reasoning) {
      turn.reasoning = (turn.reasoning ?? "") + reasoning;
      this.#addReasoning(reasoning);
    }
    if (content) {
      turn.content += content;
      this.reasoning?.classList.remove("thinking");
      this.#addText(content);
    }
    for (const { index, id, function: called } of calls) {
      turn.calls ??= [];
      const call = turn.calls[index] ??= { id: "", name: "", arguments: "" };
      call.id ||= id ?? "";
      call.name ||= called?.name ?? "";
      call.arguments += called?.arguments ?? "";
    }
    if (calls.length) this.#showCalls();
  }

  busy(words) {
    this.element.setAttribute("aria-busy", "true");
    this.element.classList.add("busy");
    this.status.textContent = words;
  }

  finish() {
    const { turn, element } = this;
    this.rendering?.finish();
    element.setAttribute("aria-busy", "false");
    element.classList.remove("busy");
    this.reasoning?.classList.remove("thinking");
    this.status.textContent = "";
    if (turn.vectors) this.body.replaceChildren(vectorsShown(turn.vectors));
    if (turn.error) {
      this.element.insertBefore(make("p", { className: "error", textContent: turn.error, testid: "error" }), this.facts);
    }
    if (turn.calls?.length) this.#showCalls(true);
    this.showFacts();
  }

  // Shows the facts, and what can be done with the answer.
  showFacts() {
    const { turn, actions } = this, { facts } = turn;
    const buttons = [];
    if (facts?.id) {
      this.explain = button("Why this long?", () => this.#explain(), {
        className: "quiet", testid: "explain", title: "Where its time went, from the server (Alt+E)" });
      this.explain.setAttribute("aria-expanded", "false");
      buttons.push(this.explain, button("Slots", () => actions.onSlots(facts), {
        className: "quiet", testid: "slots", title: "Its slots on the timeline" }));
    }
    if (turn.content) {
      const copy = button("Copy", () => copyFrom(copy, turn.content), { className: "quiet", testid: "copy" });
      buttons.push(copy);
    }
    buttons.push(button("Retry", () => actions.onRetry(turn), { className: "quiet retry", testid: "retry" }));
    this.showNumbers(facts);
    this.facts.replaceChildren(this.numbers, make("span", { className: "actions" }, ...buttons));
  }

  showNumbers(facts) { this.numbers.replaceChildren(...(facts ? factsShown(facts) : [])); }

  async #explain() {
    const { explanation, explain } = this, opens = explanation.hidden;
    explain.setAttribute("aria-expanded", String(opens));
    explanation.hidden = !opens;
    if (!opens) return;
    explanation.textContent = "Asking the server…";
    try {
      explanation.replaceChildren(...explanationShown(await this.actions.onExplain(this.turn.facts)));
    } catch (error) {
      explanation.textContent = `The server does not explain it: ${error.message}.`;
    }
    this.onDrawn();
  }

  #addText(text) {
    if (this.isPlain) {
      this.plain ??= this.body.appendChild(make("div", { className: "plain" }, document.createTextNode("")));
      this.plain.firstChild.appendData(text);
      this.onDrawn();
      return;
    }
    this.rendering ??= new Rendering(this.body, this.onDrawn);
    this.rendering.add(text);
  }

  #addReasoning(text) {
    if (!this.reasoning) {
      const inside = make("div", { className: "plain" }, document.createTextNode(""));
      this.reasoning = make("details", { className: "fold", testid: "reasoning" },
        make("summary", { textContent: "Reasoning" }), inside);
      this.reasoning.classList.add("thinking");
      this.element.prepend(this.reasoning);
    }
    this.reasoning.lastChild.firstChild.appendData(text);
    this.onDrawn();
  }

  #showCalls(isWhole = false) {
    const { turn } = this;
    if (!turn.calls?.length) return;
    const open = [...this.calls.querySelectorAll("details")].map((one) => one.open);
    const shown = turn.calls.map((call, index) => callShown(call, open[index] ?? false));
    if (isWhole && this.actions.onResults && turn.calls.some((call) => call.result === undefined)) {
      shown.push(this.#resultsForm());
    }
    this.calls.replaceChildren(...shown);
    this.onDrawn();
  }

  // Asks for what the tools return: this page runs none.
  #resultsForm() {
    const { calls } = this.turn;
    const fields = calls.map((call) => make("textarea", {
      rows: 1, placeholder: `What ${call.name || "the tool"} returns`, label: `Result of ${call.name}`, testid: "tool-result" }));
    const form = make("form", { className: "results" }, ...fields, make("button", { textContent: "Send results" }));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      calls.forEach((call, index) => { call.result = fields[index].value; });
      this.#showCalls(true);
      this.actions.onResults(this.turn);
    });
    return form;
  }
}

function callShown(call, open) {
  const brief = call.arguments.length > SHOWN ? `${call.arguments.slice(0, SHOWN)}…` : call.arguments;
  const parts = [make("pre", { tabIndex: 0, textContent: pretty(call.arguments) })];
  if (call.result !== undefined) {
    parts.push(make("p", { textContent: "returned" }), make("pre", { tabIndex: 0, textContent: call.result }));
  }
  return make("details", { className: "fold", testid: "tool-call", open },
    make("summary", {}, "Calls ", make("code", { textContent: `${call.name}(${brief})` })), ...parts);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete yet
  }
}

// Shows how alike texts are by their vectors, and how one of them begins.
function vectorsShown({ inputs, dimensions, similarities, begins }) {
  const head = make("p", { textContent: `${plural(inputs.length, "vector")} of ${plural(dimensions, "number")}.` });
  if (inputs.length < 2) return make("div", {}, head, make("pre", { tabIndex: 0, textContent: `[${begins.join(", ")}, …]` }));
  const row = (cells, kind) => make("tr", {}, ...cells.map((cell) => make(kind, { textContent: cell })));
  const rows = inputs.map((input, index) => {
    const cells = row(similarities[index].map((one) => one.toFixed(DECIMALS)), "td");
    cells.prepend(make("th", { scope: "row", textContent: `${index + 1}. ${input.slice(0, SHOWN)}` }));
    return cells;
  });
  const table = make("table", {}, make("caption", { textContent: "Cosine similarity" }),
    make("thead", {}, row(["", ...inputs.map((_, index) => String(index + 1))], "th")), make("tbody", {}, ...rows));
  return make("div", {}, head, make("div", { className: "wide", tabIndex: 0 }, table));
}
