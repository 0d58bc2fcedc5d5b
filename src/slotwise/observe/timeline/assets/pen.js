// Drawing interfaces.  Both pens draw the same picture: one on the screen, one into an SVG file.
//
//     rect(x, y, width, height, fill, corner)   line(x1, y1, x2, y2, ink, width, dash)   text(words, x, y, ink, how)
//     shape(points, fill)   curve(points, ink, width, dash)   clipped(x, y, width, height, draw)   faint(alpha, draw)
//
// A fill is a colour or {pattern: a name in the palette}.
export const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

export class ScreenPen {
  constructor(context, palette, density = 1) {
    this.context = context;
    this.palette = palette;
    this.density = density;
    this.made = new Map();
  }

  rect(x, y, width, height, fill, corner = 0) {
    const { context } = this;
    context.fillStyle = this.#style(fill);
    if (corner && context.roundRect) {
      context.beginPath();
      context.roundRect(x, y, width, height, corner);
      context.fill();
    } else context.fillRect(x, y, width, height);
  }

  line(x1, y1, x2, y2, ink, width = 1, dash = []) { this.curve([[x1, y1], [x2, y2]], ink, width, dash); }

  curve(points, ink, width = 1, dash = []) {
    const { context } = this;
    context.strokeStyle = ink;
    context.lineWidth = width;
    context.setLineDash(dash);
    this.#trace(points);
    context.stroke();
  }

  shape(points, fill) {
    this.context.fillStyle = this.#style(fill);
    this.#trace(points);
    this.context.fill();
  }

  text(words, x, y, ink, { size = 12, align = "left", weight = 400 } = {}) {
    const { context } = this;
    context.font = `${weight} ${size}px ${FONT}`;
    context.textAlign = align;
    context.fillStyle = ink;
    context.fillText(words, x, y);
  }

  clipped(x, y, width, height, draw) {
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(x, y, width, height);
    context.clip();
    draw();
    context.restore();
  }

  faint(alpha, draw) {
    this.context.globalAlpha = alpha;
    draw();
    this.context.globalAlpha = 1;
  }

  #trace(points) {
    const { context } = this;
    context.beginPath();
    points.forEach(([x, y], index) => index ? context.lineTo(x, y) : context.moveTo(x, y));
  }

  #style(fill) {
    if (typeof fill === "string") return fill;
    let style = this.made.get(fill.pattern);
    if (!style) this.made.set(fill.pattern, style = this.#tile(this.palette.patterns[fill.pattern]));
    return style;
  }

  #tile({ size, ground, ink, lines, width }) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = size * this.density;
    const context = tile.getContext("2d");
    context.scale(this.density, this.density);
    context.fillStyle = ground;
    context.fillRect(0, 0, size, size);
    context.strokeStyle = ink;
    context.lineWidth = width;
    for (const [x1, y1, x2, y2] of lines) {
      context.beginPath();
      context.moveTo(x1, y1);
      context.lineTo(x2, y2);
      context.stroke();
    }
    const pattern = this.context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / this.density));
    return pattern;
  }
}

const escaped = (words) => String(words).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const round = (number) => Number(number.toFixed(2));

export class VectorPen {
  constructor(width, height, palette) {
    this.size = [width, height];
    this.palette = palette;
    this.parts = [];
    this.used = new Set();
    this.numClips = 0;
  }

  rect(x, y, width, height, fill, corner = 0) {
    const [rx] = Array.isArray(corner) ? [0] : [corner];
    this.parts.push(`<rect x="${round(x)}" y="${round(y)}" width="${round(width)}" height="${round(height)}"`
      + `${rx ? ` rx="${rx}"` : ""} fill="${this.#style(fill)}"/>`);
  }

  line(x1, y1, x2, y2, ink, width = 1, dash = []) { this.curve([[x1, y1], [x2, y2]], ink, width, dash); }

  curve(points, ink, width = 1, dash = []) {
    this.parts.push(`<path d="${this.#trace(points)}" fill="none" stroke="${ink}" stroke-width="${width}"`
      + `${dash.length ? ` stroke-dasharray="${dash.join(" ")}"` : ""}/>`);
  }

  shape(points, fill) { this.parts.push(`<path d="${this.#trace(points)}" fill="${this.#style(fill)}"/>`); }

  text(words, x, y, ink, { size = 12, align = "left", weight = 400 } = {}) {
    const anchor = { left: "start", center: "middle", right: "end" }[align];
    this.parts.push(`<text x="${round(x)}" y="${round(y)}" fill="${ink}" font-size="${size}" text-anchor="${anchor}"`
      + ` font-weight="${weight}">${escaped(words)}</text>`);
  }

  clipped(x, y, width, height, draw) {
    const name = `c${this.numClips++}`;
    this.parts.push(`<clipPath id="${name}"><rect x="${x}" y="${y}" width="${width}" height="${height}"/></clipPath>`,
      `<g clip-path="url(#${name})">`);
    draw();
    this.parts.push("</g>");
  }

  faint(alpha, draw) {
    this.parts.push(`<g opacity="${alpha}">`);
    draw();
    this.parts.push("</g>");
  }

  document() {
    const [width, height] = this.size;
    const tiles = [...this.used].map((name) => this.#tile(name)).join("");
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}"`
      + ` viewBox="0 0 ${width} ${height}" font-family="${escaped(FONT)}"><defs>${tiles}</defs>`
      + `${this.parts.join("\n")}</svg>\n`;
  }

  #trace(points) { return points.map(([x, y], index) => `${index ? "L" : "M"}${round(x)} ${round(y)}`).join(""); }

  #style(fill) {
    if (typeof fill === "string") return fill;
    this.used.add(fill.pattern);
    return `url(#${fill.pattern})`;
  }

  #tile(name) {
    const { size, ground, ink, lines, width } = this.palette.patterns[name];
    const strokes = lines.map(([x1, y1, x2, y2]) =>
      `<line x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" stroke="${ink}" stroke-width="${width}"/>`);
    return `<pattern id="${name}" width="${size}" height="${size}" patternUnits="userSpaceOnUse">`
      + `<rect width="${size}" height="${size}" fill="${ground}"/>${strokes.join("")}</pattern>`;
  }
}
