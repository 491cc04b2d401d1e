// Color is kept for relevance: orange for, blue against. The style sheet has each ramp's stops.
import { clamp, range } from "./dom.js";

const STEPS = 64;
const PLAIN = ["ink", "paper", "soft", "faint", "line", "sunken", "focus", "ui", "text"];

export class Colors {
  constructor(root) {
    const style = getComputedStyle(root);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    for (const name of PLAIN) this[name] = read(name);
    const ink = rgb(this.ink);
    this.ramps = {};
    for (const side of ["for", "against"]) {
      const stops = read(side).split(/\s+/).map(rgb);
      this.ramps[side] = range(STEPS + 1).map((step) => swatch(between(stops, step / STEPS), ink));
    }
    this.nothing = rgb(this.sunken);
  }

  // `limit` is the magnitude from which on the color is strongest.
  of(value, limit) {
    const step = Math.round((Math.abs(value) / limit) * STEPS);
    return this.ramps[value < 0 ? "against" : "for"][clamp(step || 0, 0, STEPS)];
  }

  // The one color of a bar, by its sign.
  side(value) {
    return this.of(Math.sign(value), 1.4).css;
  }

  // On a picture zero is transparent, and opacity rises early, so that weak relevance shows.
  over(value, limit) {
    const strength = clamp(Math.abs(value) / limit, 0, 1);
    const hue = this.of(Math.sign(value) * Math.max(0.75, 0.25 + 0.75 * strength), 1);
    return [...hue.rgb, between([[0], [128], [204], [242]], strength)[0]];
  }

  ramp(context, width, height, low = -1) {
    for (let x = 0; x < width; x++) {
      context.fillStyle = this.of(low + ((1 - low) * x) / width, 1).css;
      context.fillRect(x, 0, 1.5, height);
    }
  }
}

function rgb(hex) {
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
}

function between(stops, at) {
  const left = Math.min(Math.floor(at * (stops.length - 1)), stops.length - 2);
  const part = at * (stops.length - 1) - left;
  return stops[left].map((value, k) => Math.round(value + (stops[left + 1][k] - value) * part));
}

// WCAG 2: relative luminance, and the contrast of two.
function luminance(color) {
  const [red, green, blue] = color.map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

// A background and the text on it: ink where it can be read, else black or white.
function swatch(color, ink) {
  const [black, white] = [contrast(color, [0, 0, 0]), contrast(color, [255, 255, 255])];
  const text = contrast(color, ink) >= 4.6 ? "" : black > white ? "#000" : "#fff";
  return { rgb: color, css: `rgb(${color})`, text };
}
