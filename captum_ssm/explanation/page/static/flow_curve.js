// How many edges are shown, and what they carry: a slider under its curve, which can be dragged, too.
import { clamp, element, fill, svg } from "./dom.js";
import { abs, max, min } from "./flow_graph.js";
import { count, percent } from "./format.js";

const [CHART, LEFT, RIGHT, ABOVE, BASE] = [112, 8, 38, 8, 18];
const MARKED_COUNTS = [1, 10, 20, 40, 100];

export class FlowCurve {
  constructor(choose) {
    this.choose = choose;
    this.presets = element("div", { class: "segments", role: "group", "aria-label": "Edges for a share" });
    this.said = element("p", { class: "carried" });
    this.chart = svg("svg", { class: "chart", "aria-hidden": "true", height: CHART });
    this.slider = element("input", { type: "range", min: 0, step: 1, "aria-label": "Edges shown",
      oninput: () => choose(this.graph.stops[this.slider.value]) });
    this.honest = element("p", { class: "quiet" });
    this.node = element("section", { class: "carry" },
      element("div", { class: "heading" },
        element("h3", { class: "label", "data-word": "edges" }, "Edges shown"), this.presets),
      this.said, this.chart, this.slider, this.honest);
    for (const event of ["pointerdown", "pointermove"]) this.chart.addEventListener(event, (each) => this.#drag(each));
  }

  // One step more or less.
  step(by) {
    const { stops } = this.graph;
    this.choose(stops[clamp(stops.indexOf(this.k) + by, 0, stops.length - 1)]);
  }

  update(graph, k) {
    Object.assign(this, { graph, k });
    this.node.hidden = !graph.stops.length;
    if (this.node.hidden) return;
    const share = graph.share(k);
    const edges = element("b", {}, `${k.toLocaleString("en")} of ${graph.of.toLocaleString("en")}`);
    const much = element("b", {}, percent(max(0, share)));
    fill(this.said, edges, graph.isMeasured ? [k === 1 ? " carries " : " carry ", much, " of the score"]
      : [k === 1 ? " holds " : " hold ", much, " of all that tokens read"]);
    fill(this.honest, this.#honest());
    Object.assign(this.slider, { max: max(0, graph.stops.length - 1), value: graph.stops.indexOf(k),
      ariaValueText: `${count(k, "edge")}, ${percent(max(0, share))}` });
    this.#choices();
    this.#draw();
  }

  #choices() {
    const { graph: { presets }, k } = this;
    const focused = [...this.presets.children].indexOf(document.activeElement);
    fill(this.presets, presets.map((preset, n) => element("button", {
      type: "button", disabled: !preset.k, "data-tip": `The fewest edges for ${percent(preset.share)}`,
      "aria-pressed": String(preset.k === k && presets[n + 1]?.k !== k), onclick: () => this.choose(preset.k),
    }, percent(preset.share))));
    if (focused >= 0) this.presets.children[focused].focus({ preventScroll: true });
  }

  // Where the curve settles, and whether the model still answers so with these edges alone.
  #honest() {
    const { graph: { alone, settled, isMeasured }, k } = this;
    const words = [];
    if (isMeasured && !settled) words.push("The share does not settle within 10% here.");
    else if (settled > k) words.push(`From ${count(settled, "edge")} on the share stays within 10% of all.`);
    if (isMeasured && this.graph.share(k) > 1.05) words.push("More than 100%: what is left out opposes the answer.");
    if (alone) {
      const which = alone.edges === 1 ? "the largest edge" : `the largest ${alone.edges} edges`;
      words.push(`With ${which} alone, the model ${alone.right ? "still gives" : "no longer gives"} this answer.`);
    }
    return words.join(" ");
  }

  #draw() {
    const { graph, k, chart } = this;
    const { points, stops } = graph;
    const width = chart.parentNode.clientWidth || 300;
    const shares = points.map(([, share]) => share);
    const [low, high] = [max(-0.5, min(0, ...shares)), min(1.7, max(1.1, ...shares))];
    this.x = (n) => LEFT + (n * (width - LEFT - RIGHT)) / max(1, points.length - 1);
    const y = (share) => ABOVE + (CHART - ABOVE - BASE) * (1 - (clamp(share, low, high) - low) / (high - low));
    const line = (first, end) => shares.slice(first, end)
      .map((share, n) => `${n ? "L" : "M"}${this.x(first + n)} ${y(share)}`).join("");
    const at = max(0, stops.indexOf(k));
    const rules = low < 0 ? [0, 0.5, 1] : [0.5, 1];
    const isMarked = ([number], n) => n === points.length - 1 || (MARKED_COUNTS.includes(number) && this.x(n) < width - 70);
    chart.setAttribute("width", width);
    fill(chart,
      svg("rect", { class: "hit", width, height: CHART }),
      svg("path", { class: "area", d: `${line(0, at + 1)}L${this.x(at)} ${y(low)}L${LEFT} ${y(low)}Z` }),
      rules.map((share) => [
        svg("line", { class: share === 1 ? "whole" : "", x1: LEFT, x2: width - RIGHT, y1: y(share), y2: y(share) }),
        svg("text", { x: width - RIGHT + 6, y: y(share) + 4 }, percent(share))]),
      svg("path", { class: "drawn", d: line(0, stops.length) }),
      stops.length < points.length && svg("path", { class: "drawn beyond", d: line(stops.length - 1) }),
      svg("line", { class: "drawn", x1: this.x(at), x2: this.x(at), y1: y(shares[at] ?? 0), y2: CHART - BASE }),
      svg("circle", { cx: this.x(at), cy: y(shares[at] ?? 0), r: 4.5 }),
      points.map((point, n) => isMarked(point, n) &&
        svg("text", { x: this.x(n), y: CHART - 4, "text-anchor": n ? "middle" : "start" }, point[0])));
    this.slider.style.width = `${this.x(stops.length - 1) + LEFT}px`;
  }

  #drag(event) {
    if (!event.buttons) return;
    const x = event.clientX - this.chart.getBoundingClientRect().left;
    const { stops } = this.graph;
    const near = stops.reduce((best, _, n) => (abs(this.x(n) - x) < abs(this.x(best) - x) ? n : best), 0);
    if (stops[near] !== this.k) this.choose(stops[near]);
  }
}
