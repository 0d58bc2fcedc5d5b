// The chat page.  Tests find its parts by data-testid:
//   composer send stop retry edit copy system-prompt sampling tools new-chat history key theme explain timeline-toggle
//   answer question reasoning tool-call wake facts explanation slots
export const $ = (id) => document.getElementById(id);

// Makes an element.  `testid`, `label` and `dataset` become attributes; everything else is a property.
export function make(kind, { testid, label, dataset, ...properties } = {}, ...children) {
  const made = Object.assign(document.createElement(kind), properties);
  if (testid) made.dataset.testid = testid;
  if (label) made.setAttribute("aria-label", label);
  Object.assign(made.dataset, dataset);
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

export function button(words, act, properties = {}) {
  const made = make("button", { type: "button", textContent: words, ...properties });
  made.addEventListener("click", act);
  return made;
}

// Copies text, and says on the button that it did.
export async function copyFrom(source, text) {
  const words = source.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // the address is neither https nor localhost, or the browser says no
    const field = make("textarea", { value: text, className: "hidden" });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  source.textContent = "Copied";
  setTimeout(() => { source.textContent = words; }, 1500);
}

export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(1e3 * seconds)} ms`;
  if (seconds < 99.5) return `${seconds.toFixed(seconds < 9.95 ? 2 : 1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}
