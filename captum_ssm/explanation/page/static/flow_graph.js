// The circuit of one answer: tokens between layers, what they read from each other, and what of it is shown.
import { added, range } from "./dom.js";
import { signed } from "./format.js";

export const { abs, max, min } = Math;
const DEEP = 8; // from more layers on, a token's quiet nodes are folded
const FEW_EDGES = 40; // edges that are shown at first, at most
const [WANTED, HELD] = [0.9, 0.6]; // the share that is shown at first: measured, or of all magnitudes
export const PRESETS = [0.5, 0.8, 0.9, 0.95];
const NO_FLOW = { value: 0, arrived: 0, left: 0, parts: [] };

// What of a circuit is shown, in the address; at first, the fewest edges with a large share, and the
// path of the token that decides.
export const FLOW_START = { edges: 0, path: -1, at: "" };
export const FLOW_SWITCHES = { pos: 1, neg: 1, kept: 1, heads: 0, fold: 1 };

export const spot = (stage, token) => `${stage}:${token}`;
export const bySize = (a, b) => abs(b.value) - abs(a.value);

export class FlowGraph {
  constructor(data) {
    Object.assign(this, data);
    this.depth = data.layers.length;
    this.isDeep = this.depth > DEEP;
    this.isHybrid = data.layers.some(({ kind }) => kind !== data.layers[0].kind);
    this.nodes = new Map(data.nodes.map(([stage, t, value, arrived = 0, left = 0]) =>
      [spot(stage, t), { value, arrived, left }]));
    this.stays = new Map(data.stays.map(([layer, t, value, ...parts]) => [spot(layer, t), { value, parts }]));
    this.reads = data.edges.map(([layer, from, to, value, heads, kind], rank) => ({
      id: `e${rank}`, rank, kind: kind ?? "mix", layer, end: kind === "shift" ? layer : layer + 1, from, to, value,
      heads: heads ?? [], parts: [],
    }));
    const known = new Map(this.reads.map((edge) => [`${edge.layer} ${edge.from} ${edge.end} ${edge.to}`, edge]));
    this.paths = data.paths.map(({ share, nodes }) => ({
      share,
      start: nodes[0][1],
      steps: nodes.slice(1).map(([end, to], n) => {
        const [layer, from] = nodes[n];
        return from === to ? { layer, stays: from } : known.get(`${layer} ${from} ${end} ${to}`);
      }).filter(Boolean),
    }));
    // Told first is the path of the token that decides: the likeliest from any but the output's own.
    this.told = max(0, this.paths.findIndex(({ start }) => (data.cause ?? -1) < 0 ? start !== data.at : start === data.cause));
    this.cause = data.cause ?? this.paths[this.told]?.start ?? data.at;
    this.#countings();
  }

  // By how many edges may be shown: what share they carry by runs of the model, or hold of all magnitudes.
  #countings() {
    const sizes = this.reads.slice(0, this.ranked).map(({ value }) => abs(value));
    const whole = added(sizes) / (this.held || 1) || 1;
    let sum = 0;
    const held = sizes.map((size, n) => [n + 1, (sum += size) / whole]);
    this.isMeasured = Boolean(this.curve?.length);
    this.points = this.isMeasured ? this.curve : held.filter(([k]) => k <= FEW_EDGES || k % 5 === 0 || k === this.ranked);
    this.stops = this.points.map(([k]) => k).filter((k) => k <= this.ranked);
    const few = this.points.filter(([k, share]) => k <= min(FEW_EDGES, this.ranked) && share <= 1.1);
    const enough = this.isMeasured ? WANTED : HELD;
    const best = few.find(([, share]) => share >= enough) ?? [...few].sort((a, b) => b[1] - a[1])[0];
    const most = held.find(([k, share]) => k <= FEW_EDGES && share >= HELD)?.[0] ?? 0;
    this.opening = this.stops.find((k) => k >= max(best?.[0] ?? 0, most)) ?? this.stops.at(-1) ?? 0;
    const last = this.points.findLastIndex(([, share]) => abs(share - 1) > 0.1);
    this.settled = this.isMeasured ? this.points[last + 1]?.[0] : null;
    this.presets = PRESETS.map((share) => ({ share, k: this.points.find(([k, x]) => x >= share && k <= this.ranked)?.[0] }));
  }

  // What an address asks for, where that is here.
  corrected({ edges, path, at }) {
    const isHere = this.nodes.has(at) || this.stays.has(at.slice(1)) || this.reads.some(({ id }) => id === at);
    return { edges: this.stops.includes(edges) ? edges : 0, path: this.paths[path] ? path : -1, at: isHere ? at : "" };
  }

  share(k) {
    return this.points.find(([count]) => count === k)?.[1] ?? 0;
  }

  // The number of edges that can be shown and is nearest; 0 stands for that at first.
  nearest(k) {
    if (!k) return this.opening;
    return this.stops.reduce((a, b) => (abs(b - k) < abs(a - k) ? b : a), this.stops[0] ?? 0);
  }

  isJump({ kind, layer }) {
    return kind === "mix" && this.layers[layer].kind !== "recurrence";
  }

  // The largest edges, those of a path, and what their tokens keep until it is read.
  shown({ k, path, isFolded, isFor, isAgainst, isKept }) {
    const onPath = new Set(path?.steps);
    const mixes = this.reads.filter((edge) => edge.kind === "mix" && (edge.rank < min(k, this.ranked) || onPath.has(edge)));
    const tops = new Map([[this.at, this.depth]]);
    const reach = (token, stage) => tops.set(token, max(tops.get(token) ?? 0, stage));
    if (path) reach(path.start, 0);
    const busy = new Set();
    for (const { layer, end, from, to } of mixes) {
      reach(from, layer);
      reach(to, end);
      busy.add(spot(layer, from)).add(spot(end, to));
    }
    const least = min(...mixes.map(({ value }) => abs(value)));
    const ofPath = [...onPath].filter(({ kind }) => kind === "shift");
    for (const { layer, from, to } of ofPath) {
      reach(from, layer);
      busy.add(spot(layer, from)).add(spot(layer, to));
    }
    const shifts = this.reads.filter((edge) => edge.kind === "shift" && (onPath.has(edge)
      || (abs(edge.value) >= least && tops.get(edge.from) >= edge.layer && tops.get(edge.to) >= edge.layer)));
    const active = new Set([...mixes, ...ofPath].map(({ layer }) => layer));
    const isDrawn = (stage) => !isFolded || stage % this.depth === 0 || active.has(stage - 1) || active.has(stage);
    const rows = range(this.depth + 1).filter(isDrawn);
    const view = { rows, active, nodes: new Map(), links: [], isSeen: (value) => (value < 0 ? isAgainst : isFor) };
    for (const [token, top] of tops) {
      const quiet = (stage) => this.isDeep && isFolded && stage && stage !== top && !busy.has(spot(stage, token));
      const stages = rows.filter((stage) => stage <= top && !quiet(stage));
      for (const stage of stages) {
        const id = spot(stage, token);
        view.nodes.set(id, { ...NO_FLOW, ...this.nodes.get(id), id, stage, token, in: [], out: [],
          isBusy: busy.has(id) || stage === 0 || stage === top });
      }
      stages.slice(1).forEach((end, n) => view.links.push(this.#kept(stages[n], end, token, isKept)));
    }
    for (const edge of [...mixes, ...shifts]) view.links.push({ ...edge, isOffered: true });
    return this.#joined(view, tops);
  }

  #kept(layer, end, token, isOffered) {
    const [low, high] = [layer, end - 1].map((stage) => this.stays.get(spot(stage, token)) ?? NO_FLOW);
    return { id: `s${spot(layer, token)}`, kind: "stay", layer, end, from: token, to: token, value: high.value,
      low: low.value, heads: [], parts: end - layer === 1 ? low.parts : [], isOffered };
  }

  // Each end knows its links, in their order from left to right, and what is missing from its sum.
  #joined(view, tops) {
    view.links = view.links.filter((link) => {
      link.source = view.nodes.get(spot(link.layer, link.from));
      link.target = view.nodes.get(spot(link.end, link.to));
      link.isShown = link.isOffered && view.isSeen(link.value);
      return link.source && link.target;
    });
    for (const link of view.links.filter(({ kind }) => kind !== "shift")) {
      link.source.out.push(link);
      link.target.in.push(link);
    }
    const side = ({ from, to }) => Math.sign(from - to);
    for (const node of view.nodes.values()) {
      node.in.sort((a, b) => side(a) - side(b) || a.from - b.from);
      node.out.sort((a, b) => (a.kind === "mix") - (b.kind === "mix") || a.to - b.to);
      node.inRest = node.stage ? node.value - added(node.in, ({ value }) => value) : 0;
      node.outRest = node.stage < this.depth ? node.value - added(node.out, ({ low, value }) => low ?? value) : 0;
      node.shifts = view.links.filter(({ kind, source, target }) => kind === "shift" && (source === node || target === node));
    }
    const tokens = [...tops.keys()].sort((a, b) => a - b);
    return Object.assign(view, { tokens, output: view.nodes.get(spot(this.depth, this.at)) });
  }

  // The drawn links that a path goes along; an upright over folded layers once.
  along(path, { links }) {
    const drawn = path.steps.map((step) => links.find((link) => step.id ? link.id === step.id
      : link.kind === "stay" && link.from === step.stays && link.layer <= step.layer && step.layer < link.end));
    return [...new Set(drawn.filter(Boolean))];
  }
}

// The head with the largest part of an edge, in words.
export function largestHead({ heads = [], value }) {
  if (heads.length < 2) return "";
  const head = heads.reduce((best, part, n) => (abs(part) > abs(heads[best]) ? n : best), 0);
  return `head ${head}: ${signed(heads[head])} of ${signed(value)}`;
}
