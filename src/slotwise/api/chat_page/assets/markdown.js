// Markdown that arrives in pieces, as sanitized DOM.
//
// A block that has ended is rendered once and stays; only the last block is rendered again while it grows:
//
//     text   | paragraph | code | paragraph that gr...
//             settled -------->  tail
//
// An open code fence and an overlong block are not rendered again at all: what arrives is added to their text.
import { button, copyFrom, make } from "./dom.js";

const LONGEST = 16_384; // characters of a block that is rendered as Markdown; a longer one is shown as it is
const REST = 4; // times as long as a rendering took until the next one: at most a fifth of the page's time
const MOST_DEFINITIONS = 20;
const DEEP = /^(?:[ \t]*(?:>|(?:[-*+]|\d{1,9}[.)])[ \t])){20}/m; // quotes and lists nested 20 deep: hostile
const FENCE = /^ {0,3}(`{3,}|~{3,})[^\n]*\n/;
const TAGS = ["p", "br", "hr", "strong", "em", "del", "code", "pre", "ul", "ol", "li", "blockquote", "a", "h1", "h2", "h3",
  "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"];
const CLEAN = {
  RETURN_DOM_FRAGMENT: true, ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "title", "start", "class", "align"],
  ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
};
const MARKS = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => text.replace(/[&<>"']/g, (mark) => MARKS[mark]);

const { Lexer, Marked } = globalThis.marked;
const markdown = new Marked({
  gfm: true,
  renderer: {
    // HTML in an answer is text: what a model writes is shown, not obeyed.  A line break is harmless, and usual in tables.
    html({ text, block }) {
      if (/^<br\s*\/?>$/i.test(text.trim())) return "<br>";
      return block ? `<p>${escaped(text.trim()).replaceAll("\n", "<br>")}</p>` : escaped(text);
    },
    // An image is a link: nothing is loaded from anywhere.
    image({ href, text }) { return `<a href="${escaped(href)}">${escaped(text || "image")}</a> (image, not loaded)`; },
    checkbox({ checked }) { return checked ? "☑ " : "☐ "; },
  },
});

globalThis.DOMPurify.addHook("uponSanitizeAttribute", (_, data) => {
  if (data.attrName === "class" && !/^language-[\w+#.-]{1,40}$/.test(data.attrValue)) data.keepAttr = false;
});
globalThis.DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A" || !node.hasAttribute("href")) return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

// Returns Markdown as a fragment of the page.
function rendered(source, definitions = "") {
  const fence = FENCE.exec(source);
  if (fence) return fenced(source, fence);
  if (source.length > LONGEST || DEEP.test(source)) return plainText(source);
  let html;
  try {
    html = markdown.parse(source.includes("[") ? source + definitions : source);
  } catch { // nested too deeply
    return plainText(source);
  }
  const fragment = globalThis.DOMPurify.sanitize(html, CLEAN);
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code") ?? pre;
    const language = /^language-(.+)$/.exec(code.className)?.[1] ?? "";
    const frame = codeFrame(language, code.textContent.replace(/\n$/, ""));
    pre.replaceWith(frame);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = make("div", { className: "wide", tabIndex: 0 });
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

function plainText(text) { return make("div", { className: "plain" }, document.createTextNode(text)); }

function fenced(source, [head, marks]) {
  const inside = source.slice(head.length), end = closing(marks).exec(inside);
  return codeFrame(languageOf(head, marks), end ? inside.slice(0, end.index) : inside);
}

const languageOf = (head, marks) => /[\w+#.-]{1,40}/.exec(head.trim().slice(marks.length))?.[0] ?? "";

// A code block with its language and a button that copies it.
function codeFrame(language, text) {
  const code = make("code", {}, document.createTextNode(text));
  const copy = button("Copy", () => copyFrom(copy, code.textContent), { className: "quiet", testid: "copy-code" });
  const head = make("figcaption", {}, make("span", { textContent: language }), copy);
  return make("figure", { className: "code" }, head, make("pre", { tabIndex: 0 }, code));
}

export class Rendering {
  // `onDrawn` is called after each drawing.
  constructor(target, onDrawn = () => {}) {
    this.target = target;
    this.onDrawn = onDrawn;
    this.text = "";
    this.settled = 0; // characters whose blocks stay as they are
    this.tail = make("div", { className: "tail" });
    this.open = null; // an open fence or an overlong block: {node, drawn, end}
    this.cost = 0; // milliseconds of the last drawing
    this.pending = 0;
    target.replaceChildren(this.tail);
  }

  add(text) {
    this.text += text.replaceAll("\r", "");
    this.pending ||= setTimeout(() => requestAnimationFrame(() => this.#draw()), REST * this.cost);
  }

  // Draws what is left; nothing more arrives.
  finish() {
    clearTimeout(this.pending);
    const definitions = this.#definitions();
    if (definitions) [this.settled, this.open] = [0, null], this.target.replaceChildren(this.tail);
    this.#draw(true, definitions);
  }

  #draw(isWhole = false, definitions = "") {
    if (!isWhole && !this.pending) return; // it was finished meanwhile
    this.pending = 0;
    const began = performance.now();
    if (isWhole || !this.open || !this.#extend()) this.#render(isWhole, definitions);
    this.cost = performance.now() - began;
    this.onDrawn();
  }

  // Adds what arrived to the open block.  Returns false where the block may have ended.
  #extend() {
    const { node, drawn, end } = this.open;
    const line = this.text.lastIndexOf("\n", drawn - 1) + 1;
    if (end.test(this.text.slice(line))) return false;
    node.appendData(this.text.slice(drawn));
    this.open.drawn = this.text.length;
    return true;
  }

  #render(isWhole, definitions) {
    this.open = null;
    const rest = this.text.slice(this.settled), blocks = blocksOf(rest);
    const last = isWhole ? "" : blocks.pop() ?? "";
    for (const block of blocks) {
      this.tail.before(rendered(block, definitions));
      this.settled += block.length;
    }
    const fence = FENCE.exec(last);
    if (fence && !closes(last, fence[1])) return this.#openFence(last, fence);
    this.tail.replaceChildren(rendered(last));
    if (!fence && last.length > LONGEST) {
      const node = this.tail.firstChild.firstChild;
      this.open = { node, drawn: this.text.length, end: /(^|\n)[ \t]*\n/ };
    }
  }

  #openFence(source, [head, marks]) {
    const frame = codeFrame(languageOf(head, marks), source.slice(head.length));
    this.tail.replaceChildren(frame);
    const node = frame.querySelector("code").firstChild;
    this.open = { node, drawn: this.text.length, end: closing(marks) };
  }

  // Definitions of links, which may stand behind their uses.
  #definitions() {
    const found = this.text.match(/^ {0,3}\[[^\]\n]{1,80}\]: \S.{0,300}$/gm) ?? [];
    return found.length ? `\n\n${found.slice(0, MOST_DEFINITIONS).join("\n")}` : "";
  }
}

const closing = (marks) => new RegExp(`(^|\\n) {0,3}${marks[0]}{${marks.length},}[ \\t]*(\\n|$)`);
const closes = (source, marks) => closing(marks).test(source.slice(source.indexOf("\n") + 1));

// Returns the source of each block of a text.  They make up the text again.
function blocksOf(text) {
  if (DEEP.test(text)) return [text];
  let tokens;
  try {
    tokens = new Lexer({ ...markdown.defaults }).blockTokens(text, []);
  } catch {
    return [text];
  }
  const blocks = [];
  for (const { type, raw } of tokens) {
    if (type === "space" && blocks.length) blocks[blocks.length - 1] += raw;
    else blocks.push(raw);
  }
  return blocks.join("") === text ? blocks : [text];
}
