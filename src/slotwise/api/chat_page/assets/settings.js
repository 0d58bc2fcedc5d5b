// What a request says beside its messages: the system prompt, sampling and tools.  It is kept in this browser.
import { $, make } from "./dom.js";
import { store } from "./store.js";

const FIELDS = [ // name, words, step
  ["temperature", "Temperature", 0.1], ["top_p", "Top p", 0.05], ["top_k", "Top k", 1], ["min_p", "Min p", 0.01],
  ["max_tokens", "Most tokens", 1], ["seed", "Seed", 1], ["repetition_penalty", "Repetition penalty", 0.05],
  ["presence_penalty", "Presence penalty", 0.1], ["frequency_penalty", "Frequency penalty", 0.1],
];
const COMPLETION_TOKENS = 256; // of a completion without a number of its own: the server's default is OpenAI's 16
const EXAMPLE = [{
  type: "function", function: {
    name: "get_weather", description: "The weather of a city, now", parameters: {
      type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];

export class Settings {
  // `onSystem` receives the system prompt when it is changed.
  constructor(onSystem) {
    const { sampling = {}, tools = "", toolChoice = "" } = store.settings;
    this.fields = new Map(FIELDS.map(([name, words, step]) => {
      const field = make("input", { id: `of-${name}`, type: "number", step: "any", inputMode: step < 1 ? "decimal" : "numeric",
        value: sampling[name] ?? "" });
      $("sampling").append(make("label", { htmlFor: field.id, textContent: words }), field);
      return [name, field];
    }));
    const stop = make("input", { id: "of-stop", type: "text", value: sampling.stop ?? "" });
    $("sampling").append(make("label", { htmlFor: stop.id, textContent: "Stop before" }), stop);
    this.stop = stop;
    $("tools").value = tools;
    $("toolchoice").value = toolChoice;
    for (const field of [...this.fields.values(), stop, $("tools"), $("toolchoice")]) {
      field.addEventListener("input", () => this.#keep());
    }
    $("system").addEventListener("input", () => {
      onSystem($("system").value);
      this.#keep();
    });
    $("reset").addEventListener("click", () => {
      for (const field of [...this.fields.values(), stop, $("tools"), $("toolchoice"), $("system")]) field.value = "";
      onSystem("");
      this.#keep();
    });
    $("exampletool").addEventListener("click", () => {
      $("tools").value = JSON.stringify(EXAMPLE, null, 2);
      this.#keep();
    });
    this.#check();
  }

  get system() { return store.settings.system ?? ""; }

  // Shows the defaults of a model, and hides what it cannot do.
  describe(model) {
    for (const [name, field] of this.fields) field.placeholder = model?.default_sampling_params?.[name] ?? "";
    $("tooling").hidden = !(model?.capabilities ?? []).includes("tools");
  }

  // Throws an Error, with the `field` at fault, where something typed could not be sent.
  check() {
    for (const [name, words] of FIELDS) {
      const field = this.fields.get(name);
      if (field.validity.badInput) throw Object.assign(new Error(`${words} is not a number.`), { field });
    }
    try {
      this.tools();
    } catch (error) {
      throw Object.assign(error, { field: $("tools") });
    }
  }

  // The sampling parameters of a request.
  sampling(mode) {
    const found = mode === "completion" ? { max_tokens: COMPLETION_TOKENS } : {};
    for (const [name, field] of this.fields) if (field.value !== "") found[name] = Number(field.value);
    if (this.stop.value) found.stop = this.stop.value;
    return found;
  }

  // The tools of a request.  Throws an Error where they are not JSON.
  tools() {
    const text = $("tools").value.trim();
    if (!text || $("tooling").hidden) return {};
    const tools = parsedTools(text), choice = $("toolchoice").value;
    return choice ? { tools, tool_choice: choice } : { tools };
  }

  #keep() {
    const sampling = Object.fromEntries([...this.fields].map(([name, field]) => [name, field.value]));
    store.settings = { system: $("system").value, sampling: { ...sampling, stop: this.stop.value },
      tools: $("tools").value, toolChoice: $("toolchoice").value };
    this.#check();
  }

  #check() {
    const text = $("tools").value.trim();
    try {
      if (text) parsedTools(text);
      $("wrongtools").textContent = "";
    } catch (error) {
      $("wrongtools").textContent = error.message;
    }
  }
}

function parsedTools(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("The tools are a list: [{\"type\": \"function\", \"function\": {...}}]");
  return tools;
}
