// The controls and their actions.
import { KEYS } from "./hands.js";
import { $, element } from "./page.js";
import { savePng, saveSvg, saveTrace } from "./save.js";
import { readLines } from "./service.js";
import { duration } from "./story.js";

const WHOLE = 600; // steps of a saved log shown at first
const SLOTS_OFFERED = [1, 2, 4, 8, 12, 16, 32, 64, 128, 256];

// Updates the controls to the service's settings.
function controls(page) {
  const { run } = page.history;
  if (!run) return;
  $("model").textContent = [run.model.split("/").pop(), run.dtype, run.device].filter(Boolean).join(" · ");
  const segment = page.history.segments[page.history.segments.length - 1];
  $("batching").value = segment.kind;
  const most = run.limits.max_num_seqs;
  const choices = [...new Set(SLOTS_OFFERED.filter((one) => one < most).concat(most, segment.capacity))];
  $("slots").replaceChildren(...choices.sort((one, other) => one - other).map((one) => new Option(one, one)));
  $("slots").value = segment.capacity;
}

export function attachControls(page, demo) {
  page.onScheduling = () => controls(page);
  const click = (id, act) => $(id).addEventListener("click", (event) => { act(event); page.changed(); });
  page.actions = actions(page, demo);
  for (const id of ["pause", "theme", "help", "compare"]) click(id, page.actions[id]);
  click("fold", () => page.fold());
  for (const id of ["steps", "seconds"]) click(id, () => measureIn(page, id));
  click("first", page.actions.compare);
  click("in", () => page.view.zoom(1.6));
  click("out", () => page.view.zoom(1 / 1.6));
  click("all", () => page.view.fit());
  click("png", () => savePng(page.scene(null), ...page.size));
  click("svg", () => saveSvg(page.scene(null), ...page.size));
  click("trace", () => saveTrace(page.history));
  click("save", (event) => { if (event.target.closest("button")) $("save").open = false; });
  $("file").addEventListener("change", async ({ target }) => {
    $("save").open = false;
    if (target.files[0]) await openLog(page, target.files[0].stream(), target.files[0].name);
  });
  const keys = $("keys").querySelector("dl");
  for (const [words, meaning] of KEYS) keys.append(element("dt", words), element("dd", meaning));
}

function actions(page, demo) {
  return {
    pause() {
      if (page.view.following) page.view.following = false;
      else page.view.follow();
    },
    unit() { measureIn(page, page.view.unit === "steps" ? "seconds" : "steps"); },
    theme() {
      page.dark = !page.dark;
      localStorage.setItem("slotwise-theme", page.dark ? "dark" : "light");
      page.paint();
    },
    help() { $("keys").showModal(); },
    neighbor(by) {
      const known = [...page.history.requests.keys()].sort((one, other) => one - other);
      if (known.length) page.pin(known[Math.max(0, known.indexOf(page.pinned) + by) % known.length]);
    },
    async compare() {
      if (!page.saved && !$("compare").disabled && await agreed(demo, COMPARES)) compare(page, demo);
    },
  };
}

function measureIn(page, unit) {
  page.view.measure(unit);
  for (const id of ["steps", "seconds"]) $(id).setAttribute("aria-pressed", String(id === unit));
  page.changed();
}

function say(words) { $("said").textContent = words; }

// Runs a request to the service with its buttons disabled; shows the error if it fails.
async function asking(ids, act) {
  for (const id of ids) $(id).disabled = true;
  try {
    await act();
  } catch (error) {
    say(`That did not work: ${error.message}`);
  } finally {
    for (const id of ids) $(id).disabled = false;
  }
}

const COMPARES = "“Static, then continuous” changes the batching and the slots of every request on this server for some"
  + " seconds, and then restores them.";
const CHANGES = {
  batching: (words) => `Every request on this server would be batched by “${words}”.`,
  slots: (words) => `All requests on this server would share slots: ${words}.`,
};

// Asks before others' requests are affected; resolves to whether the change is wanted.
function agreed(demo, change) {
  const { others } = demo, sure = $("sure");
  if (!others) return true;
  [$("others").textContent, $("change").textContent] = [others, change];
  sure.returnValue = "";
  sure.showModal();
  return new Promise((done) => {
    sure.addEventListener("close", () => done(sure.returnValue === "change"), { once: true });
  });
}

const PARTS = {
  static: "Static: finished requests are held, and the queue waits, until the longest answer of the batch has ended.",
  continuous: "Continuous, the same requests: a slot that is freed is taken at the very next step.",
};
const DEMO = ["compare", "first", "send", "batching", "slots"];

function compare(page, demo) {
  return asking(DEMO, async () => {
    measureIn(page, "steps");
    const extents = await demo.compare((batching) => {
      say(PARTS[batching]);
      if (batching === "static") page.view.keep();
    });
    const { history } = page;
    const [first, second] = extents.map((extent) => worth(history, extent));
    if (page.view.following) page.view.show(first.from, second.to);
    say(`The same requests: static ${first.words}; continuous ${second.words}.`
      + ` ${(first.seconds / second.seconds).toFixed(1)}× as fast.`);
    page.changed();
  });
}

// Returns the time of steps [from, to), and the share of the needed slots that did useful work.
function worth(history, { from, to }) {
  const seconds = history.step(to - 1).until - history.step(from).at;
  const share = Math.round(100 * history.needed(from, to));
  return { from, to, seconds, words: `${to - from} steps, ${duration(seconds)}, ${share}% of the needed slots used` };
}

export async function openLog(page, stream, name) {
  page.saved = true;
  document.body.classList.add("saved");
  page.begin();
  try {
    await readLines(stream, (entries) => page.take(entries));
  } catch (error) {
    return say(`${name} is not an event log: ${error.message}`);
  }
  const { first, end } = page.history;
  page.view.show(first, Math.max(first + 1, Math.min(end, first + WHOLE)));
  $("state").className = "";
  $("state").textContent = `${name}: ${page.history.steps.length.toLocaleString("en")} steps`;
  page.changed();
}

export function askForKey(wrong) {
  $("wrong").hidden = !wrong;
  $("key").value = "";
  $("door").showModal();
  return new Promise((done) => $("door").addEventListener("close", () => done($("key").value), { once: true }));
}

export function live(page, service, demo) {
  $("send").addEventListener("click", () => asking(["send"], () => {
    page.view.follow();
    return demo.send(Math.min(192, Math.max(24, 3 * page.history.segments.at(-1).capacity)));
  }));
  for (const id of ["batching", "slots"]) {
    $(id).addEventListener("change", async ({ target }) => {
      const changes = id === "batching" ? { batching: target.value } : { max_num_seqs: Number(target.value) };
      const restore = () => controls(page);
      if (!await agreed(demo, CHANGES[id](target.selectedOptions[0].text))) return restore();
      await asking([id], () => demo.schedule(changes).catch((error) => { restore(); throw error; }));
    });
  }
  const open = (date) => {
    page.ahead = date - Date.now();
    page.begin();
  };
  service.follow(open, (entries) => { if (!page.saved) page.take(entries); }, (state) => {
    if (page.saved) return;
    $("state").className = state;
    $("state").textContent = state === "live" ? "live" : "no connection";
  });
}
