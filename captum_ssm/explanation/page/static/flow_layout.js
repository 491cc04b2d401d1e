// Where a circuit's nodes and edges are drawn. All widths are to one scale, so that what arrives at a
// node is as wide as what leaves it. The text is at the bottom, the answer at the top.
import { added, clamp } from "./dom.js";
import { abs, max, min } from "./flow_graph.js";

const THINNEST_LINE = 1.2;
const [ABOVE_GRAPH, BELOW_GRAPH] = [54, 62]; // room for the answer, and for the names of tokens
const STEEP_NAMES = 0.85; // of the tallest name's length, the height of names that are turned
const HALF_NODE = 3.5; // of a node's height

export class FlowLayout {
  constructor(graph, view, width, measure) {
    Object.assign(this, { graph, view });
    const isNarrow = width < 560;
    const layers = view.active.size;
    this.isSparse = !isNarrow && layers <= 4;
    const style = layers > 6 ? [20, 72, 44, 11] : isNarrow ? [26, 84, 56, 14] : this.isSparse ? [26, 124, 88, 24] : [26, 104, 68, 19];
    const [quiet, jump, run, space] = style;
    this.heights = { quiet, jump, run, space };
    this.#scale(isNarrow ? 26 : this.isSparse ? 48 : 40);
    this.#columns(width, measure, isNarrow);
    this.#ends();
    this.#bands();
  }

  thick(value) {
    return max(THINNEST_LINE, abs(value) * this.unit);
  }

  // `unit`: pixels for a relevance of 1.
  #scale(widest) {
    const nodes = [...this.view.nodes.values()];
    const full = (links, rest) => added(links, ({ value }) => abs(value)) + abs(rest);
    this.most = max(1e-9, ...nodes.map((node) => max(abs(node.value), full(node.in, node.inRest), full(node.out, node.outRest))));
    this.unit = widest / this.most;
    const drawn = (links, rest) => added(links, ({ value }) => this.thick(value)) + abs(rest) * this.unit;
    for (const node of nodes) {
      node.spread = [drawn(node.in, node.inRest), drawn(node.out, node.outRest)];
      node.width = max(5, ...node.spread, this.thick(node.value));
    }
  }

  // Tokens that carry flow have a column; between them are gaps. Names that do not fit are turned.
  #columns(width, measure, isNarrow) {
    const { graph: { tokens: texts }, view: { tokens, nodes } } = this;
    const widest = new Map(tokens.map((token) => [token, 0]));
    for (const { token, width: w } of nodes.values()) widest.set(token, max(widest.get(token), w));
    const columns = tokens.map((token, n) => ({ token, flow: widest.get(token), name: min(120, measure(texts[token])),
      skipped: token - (n ? tokens[n - 1] + 1 : 0) }));
    const after = texts.length - 1 - tokens.at(-1);
    const holes = columns.filter(({ skipped }) => skipped).length + (after ? 1 : 0);
    this.tallest = max(...columns.map(({ name }) => name));
    let size = ({ flow, name }) => max(flow + 14, name + 14, isNarrow ? 30 : 44);
    let [gap, before] = [isNarrow ? 24 : 48, 0];
    this.isSteep = added(columns, size) + holes * gap > width;
    if (this.isSteep) {
      size = ({ flow }) => max(flow + 6, 17);
      before = max(38, this.tallest * 0.46);
      gap = clamp((width - before - added(columns, size)) / (holes || 1), 5, 22);
    }
    this.gapWidth = gap;
    const needed = before + added(columns, size) + holes * gap;
    const extra = clamp((width - needed) / columns.length, 0, 96);
    this.width = max(width, needed);
    this.x = new Map();
    this.gaps = [];
    let x = before + max(0, (width - needed - extra * columns.length) / 2);
    for (const column of columns) {
      const { token, skipped } = column;
      if (skipped) {
        this.gaps.push({ x: x + gap / 2, count: skipped, from: token - skipped });
        x += gap;
      }
      const own = size(column) + extra;
      this.x.set(token, x + own / 2);
      x += own;
    }
    if (after) this.gaps.push({ x: x + gap / 2, count: after, from: tokens.at(-1) + 1 });
  }

  // Where along its nodes a link begins and ends: what is not drawn takes the outer sides.
  #ends() {
    for (const node of this.view.nodes.values()) {
      node.x = this.x.get(node.token);
      const [arriving, leaving] = node.spread;
      let left = node.x - arriving / 2;
      node.inStub = left;
      left += abs(node.inRest) * this.unit;
      for (const link of node.in) {
        link.width = this.thick(link.value);
        link.x1 = left + link.width / 2;
        left += link.width;
      }
      left = node.x - leaving / 2;
      for (const link of node.out) {
        const own = this.thick(link.value);
        link.x0 = left + own / 2;
        left += own;
      }
      node.outStub = left;
    }
    for (const link of this.view.links.filter(({ kind }) => kind === "shift")) {
      Object.assign(link, { width: this.thick(link.value), x0: link.source.x, x1: link.target.x });
    }
  }

  // A band for each layer, or for several quiet ones, from the top down.
  #bands() {
    const { graph, view } = this;
    this.bands = view.rows.slice(1).map((end, n) => {
      const layer = view.rows[n];
      const drawn = view.links.filter((link) => link.kind !== "stay" && link.layer === layer);
      const jumps = drawn.length > 0 && graph.isJump({ kind: "mix", layer });
      const height = jumps ? this.heights.jump : drawn.length ? this.#lanes(drawn) : this.heights.quiet;
      return { layer, end, drawn, jumps, height };
    }).reverse();
    this.y = new Map();
    let top = ABOVE_GRAPH;
    for (const band of this.bands) {
      band.y = top;
      this.y.set(band.end, top);
      for (const link of band.drawn) link.laneY = top + (link.lane?.y ?? 0);
      top += band.height;
    }
    this.y.set(0, top);
    this.bottom = top;
    this.height = top + (this.isSteep ? this.tallest * STEEP_NAMES + 40 : BELOW_GRAPH);
    for (const node of view.nodes.values()) node.y = this.y.get(node.stage);
    for (const link of view.links) {
      link.y0 = this.y.get(link.layer) - HALF_NODE;
      link.y1 = this.y.get(link.end) + (link.kind === "shift" ? -HALF_NODE : HALF_NODE);
      link.jumps = graph.isJump(link);
    }
  }

  // Edges of a recurrence run along their layer, each in a lane; many share lanes where they are apart.
  #lanes(drawn) {
    const many = drawn.length > 8;
    const margin = drawn.length > 30 ? 1.6 : many ? 3 : 6;
    const lanes = [];
    const left = ({ from, to }) => min(from, to);
    for (const link of [...drawn].sort((a, b) => left(a) - left(b) || a.to - b.to)) {
      const [low, high] = [link.from, link.to].map((token) => this.x.get(token)).sort((a, b) => a - b);
      let lane = many && lanes.find((each) => each.high + 14 < low);
      if (!lane) lanes.push((lane = { width: 0 }));
      lane.high = high;
      lane.width = max(lane.width, link.width);
      link.lane = lane;
    }
    let y = this.heights.space + 4;
    for (const lane of lanes) {
      lane.y = y + lane.width / 2;
      y += lane.width + margin;
    }
    return max(this.heights.run, y - margin + this.heights.space);
  }
}

// The middle line of a link, moved sideways by `off`. A recurrence hands its state from token to token,
// so its edge runs along the layer; attention reads from afar, so its edge jumps.
export function course(link, off = 0) {
  const { x0, x1, y0, y1, kind, jumps, laneY, width } = link;
  const [a, b] = [x0 + off, x1 + off];
  if (kind === "stay" || jumps) {
    const bend = jumps ? (y0 - y1) * 0.62 : min(60, (y0 - y1) / 2);
    return `M${a} ${y0}C${a} ${y0 - bend} ${b} ${y1 + bend} ${b} ${y1}`;
  }
  const way = x1 < x0 ? -1 : 1;
  const radius = min(max(12, width * 0.8), abs(x1 - x0) / 2);
  const y = laneY + off * way;
  const first = max(0, min(radius, y0 - laneY) - off * way);
  // A token shift comes back down to where the layer's edges begin.
  const down = y1 > laneY ? -1 : 1;
  const second = max(0, min(radius, abs(laneY - y1)) + off * way);
  return `M${a} ${y0}V${y + first}Q${a} ${y} ${a + way * first} ${y}H${b - way * second}Q${b} ${y} ${b} ${y - down * second}V${y1}`;
}

// Both sides of an upright, which may be wider at one end.
export function outline({ x0, x1, y0, y1, low, width }, thick) {
  const [a, b, bend] = [thick(low) / 2, width / 2, min(60, (y0 - y1) / 2)];
  const [up, down] = [y1 + bend, y0 - bend];
  return `M${x0 - a} ${y0}C${x0 - a} ${down} ${x1 - b} ${up} ${x1 - b} ${y1}H${x1 + b}C${x1 + b} ${up} ${x0 + a} ${down} ${x0 + a} ${y0}Z`;
}

// One strand of an edge for each head, to scale: [offset, width, value].
export function strands({ heads, width }) {
  const whole = added(heads, abs) || 1;
  let left = -width / 2;
  return heads.map((value) => {
    const own = (abs(value) / whole) * width;
    left += own;
    return [left - own / 2, own - (width > 8 ? 0.5 : 0), value];
  }).filter(([, own]) => own > 0.2);
}

// Where the number of a link stands.
export function numberPoint({ x0, x1, y0, y1, kind, jumps, laneY, width }, room) {
  if (kind !== "stay") {
    const y = kind === "shift" ? laneY + width / 2 + 13 : (jumps ? (y0 + y1) / 2 : laneY) - width / 2 - 5;
    return { x: (x0 + x1) / 2, y, "text-anchor": "middle" };
  }
  const [left, right] = [min(x0, x1) - width / 2 - 5, max(x0, x1) + width / 2 + 5];
  const isLeft = right > room - 46;
  return { x: isLeft ? left : right, y: (y0 + y1) / 2 + 4, "text-anchor": isLeft ? "end" : "start" };
}
