// All examples as points: those that look at the same words, at the same parts of the text, lie close together.
import { brush, element, range } from "./dom.js";
import { name, percent } from "./format.js";

export class Cloud {
  constructor(lines, point, choose) {
    Object.assign(this, { lines, choose });
    this.canvas = element("canvas", { role: "img", "aria-label": "All examples as points; the list below has the same examples",
      onpointermove: (event) => point(this.#nearest(event), event), onpointerleave: () => point(null),
      onclick: (event) => { const line = this.#nearest(event); if (line) choose(line); } });
    const [xs, ys] = [0, 1].map((k) => lines.map((line) => line.point[k]));
    const scaled = (values) => {
      const [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
      return values.map((value) => (value - low) / (high - low || 1));
    };
    [this.x, this.y] = [scaled(xs), scaled(ys)];
  }

  draw(isIn, colors) {
    const { context, width, height } = brush(this.canvas);
    this.size = [width, height];
    const dot = (k, color) => {
      const [x, y] = this.#at(k);
      context.fillStyle = context.strokeStyle = color;
      context.beginPath();
      if (this.lines[k].right === false) {
        context.lineWidth = 1.5;
        context.moveTo(x - 4, y - 4); context.lineTo(x + 4, y + 4);
        context.moveTo(x + 4, y - 4); context.lineTo(x - 4, y + 4);
        context.stroke();
      } else {
        context.arc(x, y, 2.25, 0, 7);
        context.fill();
      }
    };
    const order = range(this.lines.length);
    context.globalAlpha = 0.55;
    for (const k of order) if (!isIn(this.lines[k])) dot(k, colors.faint);
    context.globalAlpha = 0.75;
    for (const k of order) if (isIn(this.lines[k])) dot(k, colors.ink);
  }

  #at(k) {
    const [width, height] = this.size;
    return [8 + this.x[k] * (width - 16), 8 + this.y[k] * (height - 16)];
  }

  #nearest(event) {
    const box = this.canvas.getBoundingClientRect();
    let [best, least] = [null, 14];
    this.lines.forEach((line, k) => {
      const [x, y] = this.#at(k);
      const far = Math.hypot(x - (event.clientX - box.left), y - (event.clientY - box.top));
      if (far < least) [best, least] = [line, far];
    });
    return best;
  }
}

export function pointTold(line) {
  return [element("div", {}, element("bdi", { class: "token" }, name(line.text))),
    element("div", { class: "quiet" }, [`“${name(line.target)}”`, line.p === null ? "" : percent(line.p),
      line.right === false ? `the model says “${name(line.prediction)}”` : "", line.group ?? ""].filter(Boolean).join(" · "))];
}
