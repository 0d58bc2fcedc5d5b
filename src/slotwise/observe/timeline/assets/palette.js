// Colours: a hue for each request, and red for waste.  One rule, here and in the report of `slotwise compare`: what is
// hatched in red was computed for nothing.  Everything shown by colour is also shown by a pattern.
const HUES = [255, 145, 305, 90, 200, 280, 120, 330, 230, 172]; // neighbors far apart, none near the hue of waste
const LIGHT = { strong: [0.5, 0.15], soft: [0.8, 0.095], line: [0.6, 0.14] };
const DARK = { strong: [0.85, 0.12], soft: [0.56, 0.11], line: [0.72, 0.12] };
const NAMES = ["page", "ink", "quiet", "rule", "lane", "accent", "loss", "loss-ground", "loss-tint", "series"];

export const KINDS = [
  ["prefill", "prompt"], ["decode", "decode"], ["cached", "found in the cache"], ["recompute", "computed again"],
  ["held", "wasted: finished, but held"], ["padding", "wasted: padding"], ["void", "wasted: computed after its end"],
  ["starved", "empty while requests wait"],
];

export class Palette {
  constructor(dark) {
    this.dark = dark;
    const style = getComputedStyle(document.documentElement);
    for (const name of NAMES) this[name.replace("-", "_")] = style.getPropertyValue(`--${name}`).trim();
    const shades = dark ? DARK : LIGHT;
    this.hues = HUES.map((hue) => Object.fromEntries(
      Object.entries(shades).map(([name, [lightness, chroma]]) => [name, hex(lightness, chroma, hue)])));
    const hatched = (lines, size = 7) => ({ size, ground: this.loss_ground, ink: this.loss, width: 1.5, lines });
    this.patterns = {
      held: hatched([[-1, 8, 8, -1], [-1, 1, 1, -1], [6, 8, 8, 6]]),
      padding: hatched([[2, 0, 2, 4]], 4),
      void: hatched([[-1, -1, 8, 8], [6, -1, 8, 1], [-1, 6, 1, 8]]),
    };
    this.hues.forEach((hue, index) => {
      this.patterns[`cached${index}`] = {
        size: 5, ground: hue.soft, ink: hue.strong, width: 1, lines: [[0, 1, 5, 1], [0, 3.5, 5, 3.5]] };
      this.patterns[`again${index}`] = {
        size: 8, ground: hue.strong, ink: this.page, width: 1.4, lines: [[-1, 9, 9, -1], [-1, -1, 9, 9]] };
    });
  }

  of(number) { return this.hues[number % HUES.length]; }

  // Returns the fill of a cell of this kind: a colour, or {pattern}.
  fill(kind, number) {
    const index = number % HUES.length;
    switch (kind) {
      case "prefill": return this.hues[index].strong;
      case "decode": return this.hues[index].soft;
      case "cached": return { pattern: `cached${index}` };
      case "recompute": return { pattern: `again${index}` };
      case "starved": return this.loss_tint;
      default: return { pattern: kind };
    }
  }
}

// OKLCH to sRGB (Ottosson, "A perceptual color space for image processing", 2020): files must open anywhere.
function hex(lightness, chroma, degrees) {
  const a = chroma * Math.cos(degrees * Math.PI / 180), b = chroma * Math.sin(degrees * Math.PI / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s, -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s];
  return "#" + linear.map((value) => {
    const part = value <= 0.0031308 ? 12.92 * value : 1.055 * value ** (1 / 2.4) - 0.055;
    return Math.round(255 * Math.min(1, Math.max(0, part))).toString(16).padStart(2, "0");
  }).join("");
}
