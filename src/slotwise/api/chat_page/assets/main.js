// The controls of the page, and its beginning.
import { Talk } from "./conversation.js";
import { $, button, make } from "./dom.js";
import { Rendering } from "./markdown.js";
import { Panel } from "./panel.js";
import { addressOf } from "./service.js";
import { Server, showState } from "./server.js";
import { Settings } from "./settings.js";
import { store } from "./store.js";

const WIDE = matchMedia("(min-width: 1000px)");
const DARK = matchMedia("(prefers-color-scheme: dark)");
const THEME = "slotwise-theme"; // the timeline's, too
const MODES = { // of what a model can do: the words on the button, the placeholder, the greeting
  chat: ["Chat", "Message", "What would you like to know?"],
  completion: ["Complete", "A text to continue", "What should the model continue?"],
  embedding: ["Embed", "Texts, one a line", "Which texts should be embedded?"],
};
const EXAMPLES = {
  chat: ["Explain continuous batching to a ten-year-old.", "Write a haiku about waiting in line.",
    "What is the capital of Norway, and what is it known for?"],
  completion: ["def read_lines(path):", "Once upon a time there was a scheduler that"],
  embedding: ["A cat sleeps on the sofa.\nA kitten naps on the couch.\nThe stock market fell today."],
};
const LINKS = [["/links", "how to send a request"], ["/docs", "every route, with a form to try it"],
  ["/timeline", "the batch, step by step, on a page of its own"], ["/metrics", "for Prometheus"], ["/v1/models", "the models"]];

const server = new Server(), panel = new Panel();
const settings = new Settings((text) => { talk.system = text; });
const talk = new Talk(server, settings, panel, showConversations);
window.slotwise = Object.assign(talk, { Rendering }); // for tests, and for inspection in the browser's console

// -- sending -----------------------------------------------------------------------------------------------------------

function grow() {
  const field = $("composer");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
  $("send").disabled = !field.value.trim();
}

function submit() {
  const text = $("composer").value;
  if (!text.trim() || talk.running) return;
  if (server.state === "asleep") return document.querySelector("[data-testid=wake]")?.focus();
  try {
    settings.check();
  } catch (error) {
    openSettings(true);
    if (error.field === $("tools")) $("tooling").open = true;
    error.field.focus();
    $("spoken").textContent = error.message;
    return;
  }
  $("composer").value = "";
  grow();
  talk.send(text);
}

$("write").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("composer").addEventListener("input", grow);
$("composer").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && !event.target.value) {
    const edit = [...document.querySelectorAll("[data-testid=edit]")].at(-1);
    if (edit) event.preventDefault();
    edit?.click();
  }
});
$("stop").addEventListener("click", () => { talk.stop(); $("composer").focus(); });
$("latest").addEventListener("click", () => talk.toEnd());
talk.onBusy = (busy) => {
  $("send").hidden = busy;
  $("stop").hidden = !busy;
};
talk.onFull = () => {
  $("notice").hidden = false;
  $("notice").textContent = "This conversation is too long to be kept in the browser; it stays until the page is closed.";
};

// -- what the model does -----------------------------------------------------------------------------------------------

function setMode(mode) {
  talk.mode = mode;
  const [, placeholder, greeting] = MODES[mode];
  $("composer").placeholder = mode === "chat" && talk.model ? `${placeholder} ${talk.model}` : placeholder;
  $("greeting").textContent = greeting;
  for (const one of $("modes").children) one.setAttribute("aria-pressed", String(one.dataset.mode === mode));
  $("examples").replaceChildren(...EXAMPLES[mode].map((text) => button(text, () => {
    $("composer").value = text;
    submit();
  }, { className: "example" })));
}

function setModel(name) {
  const model = server.models.find((one) => one.id === name) ?? server.models[0];
  talk.model = model?.id ?? "";
  $("name").textContent = model?.id ?? "";
  document.title = `${model?.id ?? "Slotwise"}: chat`;
  settings.describe(model);
  const can = Object.keys(MODES).filter((mode) => (model?.capabilities ?? ["chat"]).includes(mode));
  $("modes").replaceChildren(...can.map((mode) => button(MODES[mode][0], () => {
    if (talk.turns.length && talk.conversation.mode !== mode) talk.open(null);
    setMode(mode);
    $("composer").focus();
  }, { dataset: { mode } })));
  $("modes").hidden = can.length < 2;
  $("about").textContent = can.includes("chat") ? "" : can.includes("completion")
    ? "This model has no chat template: it continues texts." : "This model makes vectors.";
  if (can.length) setMode(can.includes(talk.mode) ? talk.mode : can[0]);
}
talk.onModelGone = loadModels;
talk.onMode = (mode) => { if (MODES[mode]) setMode(mode); };
$("model").addEventListener("change", ({ target }) => setModel(target.value));

async function loadModels() {
  try {
    await server.loadModels();
  } catch (error) {
    $("notice").hidden = false;
    $("notice").replaceChildren(make("strong", { textContent: `The models cannot be read: ${error.message}.` }), " ",
      button("Try again", loadModels, { className: "main" }));
    return;
  }
  $("notice").hidden = true;
  $("model").replaceChildren(...server.models.map(({ id }) => new Option(id, id)));
  $("choice").hidden = server.models.length < 2;
  $("name").hidden = server.models.length > 1;
  setModel($("model").value);
  showState(server);
}

// -- conversations -----------------------------------------------------------------------------------------------------

function showConversations() {
  const kept = store.list(), current = talk.conversation.id;
  $("conversations").replaceChildren(...kept.map(({ id, title }) => {
    const open = button(title || "Untitled", () => {
      const found = store.load(id);
      if (found) talk.open(found);
      if (!WIDE.matches) openMenu(false);
    }, { className: "conversation", title });
    if (id === current) open.setAttribute("aria-current", "true");
    const remove = button("×", async () => {
      store.remove(id);
      if (id === talk.conversation.id) talk.open(null);
      showConversations();
    }, { className: "quiet", label: `Delete ${title || "Untitled"}` });
    return make("li", {}, open, remove);
  }));
  $("forget").hidden = !kept.length;
}

function begin() {
  talk.open(null);
  if (!WIDE.matches) openMenu(false);
  $("composer").focus();
}

$("new").addEventListener("click", begin);
$("forget").addEventListener("click", async () => {
  const dialog = $("sure");
  dialog.querySelector("h2").textContent = "Delete all conversations?";
  dialog.querySelector("p").textContent = "They are kept in this browser only, and would be gone.";
  dialog.returnValue = "";
  dialog.showModal();
  dialog.addEventListener("close", () => {
    if (dialog.returnValue !== "delete") return;
    store.clear();
    begin();
  }, { once: true });
});
addEventListener("storage", ({ key }) => {
  if (key === THEME) paint();
  else showConversations();
});

// -- the sides of the page ---------------------------------------------------------------------------------------------

function openMenu(open) {
  document.body.classList.toggle("listed", open);
  $("menu").setAttribute("aria-expanded", String(open));
}

function openSettings(open) {
  $("settings").hidden = !open;
  $("adjust").setAttribute("aria-expanded", String(open));
  if (open) $("system").focus();
}

function paint() {
  const chosen = localStorage.getItem(THEME);
  document.documentElement.classList.toggle("dark", chosen ? chosen === "dark" : DARK.matches);
}

function turnTheme() {
  const dark = !document.documentElement.classList.contains("dark");
  localStorage.setItem(THEME, dark ? "dark" : "light");
  paint();
}

function showHelp() { $("keys").showModal(); }

$("menu").addEventListener("click", () => openMenu(!document.body.classList.contains("listed")));
$("adjust").addEventListener("click", () => openSettings($("settings").hidden));
$("done").addEventListener("click", () => { openSettings(false); $("adjust").focus(); });
$("timeline").addEventListener("click", () => panel.toggle());
$("theme").addEventListener("click", turnTheme);
$("help").addEventListener("click", showHelp);
DARK.addEventListener("change", paint);

// -- keys --------------------------------------------------------------------------------------------------------------

const KEYS = [ // with Alt: the letter, the words, the act
  ["N", "new conversation", begin],
  ["H", "conversations", () => $("menu").click()],
  ["S", "settings", () => $("adjust").click()],
  ["T", "timeline", () => panel.toggle()],
  ["E", "why the last answer took that long", () => talk.last?.explain?.click()],
  ["L", "light or dark", turnTheme],
  ["K", "these keys", showHelp],
];
const OTHERS = [["Enter", "send"], ["Shift + Enter", "new line"], ["Esc", "stop the answer"],
  ["↑", "in an empty field: edit the last message"]];
for (const [key, words] of [...OTHERS, ...KEYS.map(([key, words]) => [`Alt + ${key}`, words])]) {
  $("keys").querySelector("dl").append(make("dt", { textContent: key }), make("dd", { textContent: words }));
}
$("links").append(...LINKS.map(([path, words]) => make("li", {}, make("a", { href: addressOf(path), textContent: path }),
  ` ${words}`)));

addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if (talk.running) talk.stop();
    else if (!$("settings").hidden) $("done").click();
    else if (document.body.classList.contains("listed") && !WIDE.matches) openMenu(false);
    return;
  }
  if (!event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const found = KEYS.find(([key]) => event.code === `Key${key}`);
  if (!found) return;
  event.preventDefault();
  found[2]();
});

// -- the beginning -----------------------------------------------------------------------------------------------------

paint();
setMode("chat");
grow();
openMenu(WIDE.matches);
talk.open(null);
server.onChange = (state, before) => {
  if (state === "ok" && before) loadModels(); // it may be another one
  else if (server.models.length || state !== "ok") showState(server);
};
loadModels().then(() => server.watch());
if (WIDE.matches) $("composer").focus();
