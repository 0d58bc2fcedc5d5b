// Pointer, wheel, touch and keyboard input.
const STRIDE = 0.2; // share of the page that an arrow key moves
const STEP = 1.4; // factor of a key's zoom
const CLICK = 4; // pixels that a pointer may move within a click

// `page` has `view`, `pointedAt(x, y)`, `point`, `pin`, `changed` and the `actions` of keys.
export function attach(canvas, page) {
  const down = new Map(); // touching pointers -> last position
  let moved = 0, scrubbing = false;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  canvas.addEventListener("pointerdown", (event) => {
    const [x, y] = place(event);
    canvas.setPointerCapture(event.pointerId);
    down.set(event.pointerId, [x, y]);
    moved = 0;
    scrubbing = page.pointedAt(x, y).band === "overview";
    if (scrubbing) scrub(page, x);
  });

  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    const last = down.get(event.pointerId);
    if (!last) return page.point(page.pointedAt(x, y));
    moved += Math.abs(x - last[0]) + Math.abs(y - last[1]);
    down.set(event.pointerId, [x, y]);
    if (scrubbing) return scrub(page, x);
    if (down.size === 1 && moved > CLICK) page.view.pan(x - last[0]);
    if (down.size === 2) pinch(page, [...down.entries()], event.pointerId, last);
    page.changed();
  });

  const up = (event) => {
    const held = down.delete(event.pointerId);
    if (!held || moved > CLICK || scrubbing || event.type !== "pointerup") return;
    const pointed = page.pointedAt(...place(event));
    if (pointed.fold) return page.fold();
    page.point(pointed);
    page.pin(pointed.number);
  };
  for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, up);
  canvas.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") page.point(null); // a finger leaves when it is lifted
  });

  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    event.preventDefault();
    if (sideways || event.shiftKey) page.view.pan(-(sideways ? event.deltaX : event.deltaY));
    else page.view.zoom(Math.exp(-event.deltaY / 200), place(event)[0]);
    page.changed();
  }, { passive: false });

  canvas.addEventListener("dblclick", (event) => {
    page.view.zoom(2, place(event)[0]);
    page.changed();
  });
}

function scrub(page, x) {
  const { view } = page;
  const [low, high] = view.extent;
  const middle = low + (high - low) * (x - view.left) / view.width;
  view.pan((((view.from + view.to) / 2) - middle) * view.scale);
  page.changed();
}

function pinch(page, touching, moving, last) {
  const [[, other]] = touching.filter(([id]) => id !== moving);
  const [[, now]] = touching.filter(([id]) => id === moving);
  const apart = (one) => Math.max(20, Math.abs(one[0] - other[0]));
  page.view.zoom(apart(now) / apart(last), (now[0] + other[0]) / 2);
  page.view.pan((now[0] - last[0]) / 2);
}

const WALKS = {
  ShiftArrowLeft: [-1, 0], ShiftArrowRight: [1, 0], ShiftArrowUp: [0, -1], ShiftArrowDown: [0, 1],
};

export const KEYS = [
  ["←  →", "earlier, later", ["ArrowLeft", "ArrowRight"], (page, key) =>
    page.view.pan((key === "ArrowLeft" ? 1 : -1) * STRIDE * page.view.width)],
  ["+  −", "closer, further", ["+", "=", "-"], (page, key) => page.view.zoom(key === "-" ? 1 / STEP : STEP)],
  ["0", "everything", ["0"], (page) => page.view.fit()],
  ["space", "pause, or follow what happens", [" "], (page) => page.actions.pause()],
  ["t", "steps or wall time", ["t"], (page) => page.actions.unit()],
  ["shift + arrows", "point at another cell", Object.keys(WALKS), (page, key) => page.walk(...WALKS[key])],
  ["enter", "pin the request pointed at", ["Enter"], (page) => page.pin(page.pointed.number)],
  ["n  p", "next, previous request", ["n", "p"], (page, key) => page.actions.neighbor(key === "n" ? 1 : -1)],
  ["esc", "let go of it", ["Escape"], (page) => page.pin(null)],
  ["f", "fold or unfold idle slots", ["f"], (page) => page.fold()],
  ["d", "light or dark", ["d"], (page) => page.actions.theme()],
  ["c", "static, then continuous", ["c"], (page) => page.actions.compare()],
  ["?", "these keys", ["?"], (page) => page.actions.help()],
];

export function listen(page) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { target } = event;
    const presses = [" ", "Enter"].includes(event.key) && target.closest("button, summary");
    if (presses || target.closest("dialog, input, select")) return;
    const name = event.shiftKey && event.key.startsWith("Arrow") ? `Shift${event.key}` : event.key;
    const found = KEYS.find(([, , names]) => names.includes(name));
    if (!found) return;
    event.preventDefault();
    found[3](page, name);
    page.changed();
  });
}
