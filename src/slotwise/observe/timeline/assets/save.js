// Saves the view as a picture, and the whole history as a trace for Perfetto.
import { drawPicture } from "./picture.js";
import { ScreenPen, VectorPen } from "./pen.js";

const DENSITY = 2; // pixels of a saved picture per pixel of the page

export function savePng(scene, width, height) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width * DENSITY, height * DENSITY];
  const context = canvas.getContext("2d");
  context.scale(DENSITY, DENSITY);
  drawPicture({ ...scene, pen: new ScreenPen(context, scene.palette, DENSITY) }, height);
  canvas.toBlob((blob) => hand(blob, "batch.png"));
}

export function saveSvg(scene, width, height) {
  const pen = new VectorPen(width, height, scene.palette);
  drawPicture({ ...scene, pen }, height);
  hand(new Blob([pen.document()], { type: "image/svg+xml" }), "batch.svg");
}

export function saveTrace(history) {
  hand(new Blob([JSON.stringify(trace(history))], { type: "application/json" }), "batch.trace.json");
}

// Returns Chrome's trace event format: slots and steps are threads, waits are asynchronous, gauges are counters.
export function trace(history) {
  const events = [{ ph: "M", pid: 1, name: "process_name", args: { name: `slotwise ${history.run?.model ?? ""}` } }];
  const name = (tid, words) => events.push(
    { ph: "M", pid: 1, tid, name: "thread_name", args: { name: words } },
    { ph: "M", pid: 1, tid, name: "thread_sort_index", args: { sort_index: tid } });
  const piece = (tid, words, from, to, args) => events.push(
    { ph: "X", pid: 1, tid, name: words, ts: 1e6 * from, dur: 1e6 * (to - from), args });
  name(0, "steps");
  for (const step of history.steps) {
    const facts = { rows: step.numbers.length, ...step.sum, why: step.stop?.[0] ?? "" };
    piece(0, `step ${step.step}`, step.at, step.until, facts);
    const at = { ph: "C", pid: 1, ts: 1e6 * step.at };
    events.push({ ...at, name: "requests", args: { running: step.running, waiting: step.waiting } },
      { ...at, name: "cache blocks", args: { used: (history.run?.limits.num_blocks ?? step.free) - step.free } },
      { ...at, name: "tokens", args: step.sum });
  }
  history.lanes.forEach((lane, slot) => {
    name(slot + 1, `slot ${slot}`);
    for (const span of lane) {
      if (span.end <= history.first) continue;
      const from = history.step(Math.max(span.first, history.first)).at, to = history.step(span.end - 1).until;
      piece(slot + 1, `${span.number} ${span.kind}`, from, to,
        { request: span.number, id: history.requests.get(span.number)?.id ?? "", steps: span.end - span.first });
    }
  });
  for (const wait of history.waits) {
    const request = { pid: 1, cat: "queue", id: wait.number, name: `${wait.number} waits` };
    const until = wait.until ?? history.last?.until ?? wait.since;
    if (wait.since === null) continue;
    events.push({ ...request, ph: "b", ts: 1e6 * wait.since }, { ...request, ph: "e", ts: 1e6 * until });
  }
  return { traceEvents: events, displayTimeUnit: "ms" };
}

function hand(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1e4);
}
