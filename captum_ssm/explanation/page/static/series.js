// A series: one lane per feature, its line over the relevance of each time step.
import { brush, clamp, element, hasModifier, range } from "./dom.js";
import { digits, visible } from "./format.js";

const [LANE, LEAST_LANE, MOST_HEIGHT] = [92, 16, 620]; // pixels
const GAP = 6;
const FOOT = 22;
const TICKS = 8;

export class SeriesPanel {
  constructor(page, panel) {
    this.page = page;
    this.example = page.view.example;
    this.unit = page.view.unit;
    this.canvas = element("canvas", {
      class: "series",
      role: "img",
      tabindex: 0,
      "aria-label": `Series, ${panel.method.title}: arrow keys move, N goes to the next largest`,
      onpointermove: (event) => page.point(this.#partAt(event), this),
      onpointerdown: (event) => page.point(this.#partAt(event), this),
      onpointerleave: ({ pointerType }) => pointerType === "touch" || page.point(-1),
      onblur: () => page.point(-1),
      onkeydown: (event) => this.#key(event),
    });
    this.note = element("span", { class: "quiet" });
    this.node = element("section", { class: "panel" },
      panel.title && element("header", {}, panel.title, this.note), this.canvas);
  }

  update(panel) {
    this.panel = panel;
    this.note.textContent = `scale ±${digits(panel.limit)}`;
    this.draw();
  }

  dispose() {}
  print() {}
  describe() {}

  mark() {
    this.draw();
  }

  reveal() {
    this.canvas.scrollIntoView({ block: "nearest" });
  }

  scroll = 0;

  anchor(part) {
    const box = this.canvas.getBoundingClientRect();
    const [step, feature] = this.#place(part);
    const { left, width, lane } = this;
    const y = feature === null ? 0 : feature * (lane + GAP);
    const x = step === null ? left : left + (step * width) / this.example.size[0];
    return new DOMRect(box.x + x, box.y + y, step === null ? width : width / this.example.size[0],
      feature === null ? box.height - FOOT : lane);
  }

  draw() {
    if (!this.panel) return;
    const { example, page: { colors } } = this;
    const [steps, features] = example.size;
    const room = this.node.getBoundingClientRect().width;
    this.lane = clamp((MOST_HEIGHT - FOOT) / features - GAP, LEAST_LANE, LANE);
    this.left = room < 520 ? 64 : 104;
    this.width = room - this.left - 2;
    const foot = features * (this.lane + GAP);
    this.canvas.style.height = `${foot + FOOT}px`;
    const { context } = brush(this.canvas);
    context.textBaseline = "middle";
    for (const feature of range(features)) this.#drawLane(context, feature, feature * (this.lane + GAP));
    context.fillStyle = colors.soft;
    context.font = `11px ${colors.ui}`;
    context.textAlign = "center";
    const every = Math.max(1, Math.ceil(steps / TICKS));
    for (const step of range(Math.ceil(steps / every)).map((k) => k * every)) {
      context.fillText(String(step), this.left + ((step + 0.5) * this.width) / steps, foot + 8);
    }
    if (this.page.pointed >= 0) this.#outline(context, this.page.pointed, foot);
  }

  #drawLane(context, feature, top) {
    const { example, unit, left, width, lane, panel: { relevance, limit }, page: { colors } } = this;
    const [steps, features] = example.size;
    const across = width / steps;
    context.fillStyle = colors.sunken;
    context.fillRect(left, top, width, lane);
    for (const step of range(steps)) {
      const part = unit.of[step * features + feature];
      if (!relevance.has(part)) continue;
      context.fillStyle = colors.of(relevance.values[part], limit).css;
      context.fillRect(left + step * across, top, across + 0.5, lane);
    }
    this.#drawLine(context, example.series[feature], top);
    context.fillStyle = colors.ink;
    context.font = `12px ${colors.ui}`;
    context.textAlign = "right";
    context.fillText(shortName(context, visible(example.features[feature]), left - 12), left - 10, top + lane / 2);
  }

  // Dark on a light rim, to be seen on any color.
  #drawLine(context, values, top) {
    const { left, width, lane, page: { colors } } = this;
    const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)],
      [Infinity, -Infinity]);
    const y = (value) => top + 4 + (lane - 8) * (high > low ? (high - value) / (high - low) : 0.5);
    context.beginPath();
    values.forEach((value, step) => {
      context.lineTo(left + ((step + 0.5) * width) / values.length, y(value));
    });
    context.lineJoin = "round";
    for (const [size, color] of [[3.6, colors.paper], [1.6, colors.ink]]) {
      context.lineWidth = size;
      context.strokeStyle = color;
      context.stroke();
    }
  }

  #outline(context, part, foot) {
    const [step, feature] = this.#place(part);
    const across = this.width / this.example.size[0];
    const x = step === null ? this.left : this.left + step * across;
    const y = feature === null ? 0 : feature * (this.lane + GAP);
    context.lineWidth = 2;
    context.strokeStyle = this.page.colors.focus;
    context.strokeRect(x, y + 1, step === null ? this.width : Math.max(3, across),
      (feature === null ? foot - GAP : this.lane) - 2);
  }

  // The time step and the feature of a part, where it has one.
  #place(part) {
    const count = this.example.features.length;
    return {
      value: [Math.floor(part / count), part % count], step: [part, null], feature: [null, part],
    }[this.unit.name];
  }

  #partAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const [steps, features] = this.example.size;
    const step = clamp(Math.floor(((event.clientX - box.left - this.left) / this.width) * steps), 0, steps - 1);
    const feature = clamp(Math.floor((event.clientY - box.top) / (this.lane + GAP)), 0, features - 1);
    return this.unit.of[step * features + feature];
  }

  #key(event) {
    if (hasModifier(event)) return;
    const { relevance } = this.panel;
    const [steps, features] = this.example.size;
    const { pointed } = this.page;
    const [step, feature] = this.#place(Math.max(pointed, 0)).map((place) => place ?? 0);
    const rank = relevance.ranks.get(pointed) ?? -1;
    const at = (step, feature) =>
      this.unit.of[clamp(step, 0, steps - 1) * features + clamp(feature, 0, features - 1)];
    const to = {
      ArrowLeft: at(step - 1, feature),
      ArrowRight: at(step + 1, feature),
      ArrowUp: at(step, feature - 1),
      ArrowDown: at(step, feature + 1),
      Home: 0,
      End: this.unit.count - 1,
      n: relevance.order[rank + 1] ?? Math.max(pointed, 0),
      N: relevance.order[Math.max(0, rank - 1)] ?? 0,
    }[event.key];
    if (to !== undefined) this.page.point(to, this, { aloud: true });
    else if (event.key === "Escape") this.page.point(-1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

function shortName(context, text, most) {
  const signs = [...text];
  if (context.measureText(text).width <= most) return text;
  while (signs.length > 1 && context.measureText(`${signs.join("")}…`).width > most) signs.pop();
  return `${signs.join("")}…`;
}
