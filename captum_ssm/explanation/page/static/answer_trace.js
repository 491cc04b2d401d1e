// A whole answer: its parts, the spans of it that can be explained, and what a span rests on, hop by
// hop. A hop hands relevance on generated tokens on to what made the model write them.
import { added, range } from "./dom.js";

const LEAST = 0.02; // of the explained relevance: less of it is not followed
const MOST_HOPS = 8;
const LARGEST_FIRST = ["sentence", "line", "word"];

export const TOGETHER = -1; // what one row explains, whichever parts of the text that is

export const writtenSpan = ([first, end]) => `${first}-${end}`;

export class WholeAnswer {
  constructor(example, { regions, spans, opening }) {
    this.example = example;
    this.named = spans.map(([name, first, end]) => ({ name, span: [first, end] }));
    this.regions = regions.map(([name, first, end]) => ({ name, first, end }));
    this.opening = opening ? writtenSpan(opening) : "";
    this.rowOf = new Map(); // the row that explains a generated token
    this.given = []; // spans that one row explains, with rows of their hops
    for (const { position, role, part, hops = [], through, answers, chosen } of example.outputs) {
      const { row } = answers[chosen];
      if (row === null) continue;
      if (role === "next" && position + 1 >= example.prompt) this.rowOf.set(position + 1, row);
      if (part || hops.length) this.given.push({ span: part ?? [position + 1, position + 2], rows: [row, ...hops], bySwaps: through === "swaps" });
    }
    this.kept = new Map();
  }

  // The prompt, the reasoning or the answer that a token lies in.
  regionOf(token) {
    return this.regions.find(({ first, end }) => first <= token && token < end);
  }

  // A span as it is written, where there is relevance for it.
  span(written) {
    const match = /^(\d+)-(\d+)$/.exec(written);
    const span = match && [Number(match[1]), Number(match[2])];
    return span && this.#isExplained(span) ? span : null;
  }

  #isExplained([first, end]) {
    if (first < this.example.prompt || end > this.example.tokens.length || first >= end) return false;
    return Boolean(this.#given([first, end])) || range(end - first).some((k) => this.rowOf.has(first + k));
  }

  #given([first, end]) {
    return this.given.find(({ span }) => span[0] === first && span[1] === end);
  }

  // Whether a span has rows of hops that were computed, which hold what each token has from itself.
  hasHops(span) {
    return (this.#given(span)?.rows.length ?? 0) > 1;
  }

  // Whether each generated token up to the end of a span has a row to follow.
  canFollow([, end]) {
    const { prompt } = this.example;
    return range(end - prompt).every((k) => this.rowOf.has(prompt + k));
  }

  // The span nearest to what was asked for: itself, or the smallest one with a row that holds it.
  nearest(span) {
    if (this.#isExplained(span)) return span;
    const holds = this.given.filter(({ span: [a, b] }) => a < span[1] && span[0] < b);
    return holds.map((one) => one.span).sort((a, b) => a[1] - a[0] - b[1] + b[0])[0] ?? null;
  }

  // The spans that have a name, and those that were explained as such.
  get offered() {
    const given = this.given.map(({ span }) => ({ name: "", span }));
    const seen = new Set();
    return [...this.named, ...given].filter(({ span }) => {
      const isNew = !seen.has(writtenSpan(span));
      seen.add(writtenSpan(span));
      return isNew && this.#isExplained(span);
    });
  }

  get canPick() {
    return this.rowOf.size > 1 || this.offered.length > 1;
  }

  // Hops of a span by a method, with ways between the chosen units. A token is read from the one before
  // it, which reads itself: unless `hasOwn`, that is left out of the token's row, and unless
  // `hasTemplate`, so is what the chat template writes.
  trace(method, span, chosen, { hasOwn, hasTemplate }) {
    const unit = this.#unit(chosen);
    const key = [method, ...span, unit.name, hasOwn, hasTemplate].join();
    if (!this.kept.has(key)) {
      if (this.kept.size > 24) this.kept.clear();
      const isLeftOut = (token) => !hasTemplate && this.example.isTemplate(token);
      const leftOut = Uint8Array.from(this.example.tokens, (_, token) => Number(isLeftOut(token)));
      this.kept.set(key, new Trace(this, method, span, unit, { given: this.#given(span), hasOwn, leftOut }));
    }
    return this.kept.get(key);
  }

  // Tokens are too many to draw ways between: sentences are taken for them, or what divides the prompt.
  #unit(chosen) {
    const { units } = this.example;
    if (chosen !== "token") return units[chosen];
    const { first, end } = this.regions[0];
    const divides = ({ of }) => of[first] !== of[end - 1];
    return LARGEST_FIRST.map((name) => units[name]).find((unit) => unit && divides(unit)) ?? units.token;
  }

  // What the explained relevance adds up to minus what the method claims, of a span.
  score(method, span, sum) {
    const delta = this.example.deltas[method];
    if (!delta) return null;
    const given = this.#given(span);
    const rows = given ? [given.rows[0]] : range(span[1] - span[0]).map((k) => this.rowOf.get(span[0] + k));
    return rows.reduce((total, row) => total + (row === undefined ? 0 : delta[row]), sum);
  }
}

// A hop: `row` is what each token gives, `ways` what goes from part to part: by the part that was
// written, what it has from each other part.
class Trace {
  constructor(whole, method, [first, end], unit, { given, hasOwn, leftOut }) {
    const { example } = whole;
    Object.assign(this, { hasOwn, leftOut, apart: 0, example, whole, unit, rows: example.rows[method], prompt: example.prompt });
    this.isMissing = !this.rows;
    if (this.isMissing) return;
    this.L = example.tokens.length;
    this.picked = range(unit.of[end - 1] - unit.of[first] + 1).map((k) => unit.of[first] + k);
    const start = this.#tokens(first, end);
    // Rows of hops that were computed are shown, as far as they are what is asked for; else single rows
    // are followed.
    this.bySwaps = Boolean(given?.bySwaps);
    const isAsked = given?.rows.length > 1 && (hasOwn || this.bySwaps || !whole.canFollow([first, end]));
    this.isGiven = Boolean(given) && (isAsked || start.size < end - first);
    this.hops = this.isGiven ? given.rows.map((row, hop) => this.#read(row, hop)) : [this.#step(start, false)];
    if (!this.isGiven || given.rows.length < 2) this.#follow();
    this.totals = this.hops.map(({ row }) => sizeOf(row, 0, this.L));
    this.own = this.hops.map(({ row }) => sizeOf(row, this.prompt, this.L));
    // How much of a hop lies on own words, and so how much of what is explained comes as far as each hop.
    this.handedOn = this.own.map((own, k) => own / (this.totals[k] || 1));
    this.reached = [1];
    for (const share of this.handedOn.slice(0, -1)) this.reached.push(this.reached.at(-1) * share);
    this.all = this.#sumOf();
  }

  #tokens(first, end) {
    const tokens = range(end - first).map((k) => first + k).filter((token) => this.whole.rowOf.has(token));
    return new Map(tokens.map((token) => [token, 1]));
  }

  // A row that was computed for all of what is explained.
  #read(index, hop) {
    const row = this.rows.row(index);
    row.forEach((value, token) => {
      if (!this.leftOut[token]) return;
      if (hop === 0) this.apart += value;
      row[token] = 0;
    });
    return { row, ways: new Map([[TOGETHER, this.#byUnit(row)]]) };
  }

  // What tokens were written from, each by its weight: their rows, of which a hop takes the
  // positive part, divided by its sum.
  #step(weights, isHop) {
    const written = Map.groupBy(weights, ([token]) => this.unit.of[token]);
    const row = new Float32Array(this.L);
    const ways = new Map();
    for (const [part, tokens] of written) {
      const own = new Float32Array(this.L);
      for (const [token, weight] of tokens) this.#add(token, weight, isHop, own);
      ways.set(part, this.#byUnit(own));
      own.forEach((value, token) => { row[token] += value; });
    }
    return { row, ways };
  }

  // Rows are read as they are packed: there may be thousands.
  #add(token, weight, isHop, sum) {
    const { rows, L, hasOwn, leftOut } = this;
    const index = this.whole.rowOf.get(token);
    const steps = rows.steps.subarray(index * L, (index + 1) * L);
    const scale = weight * (isHop ? 1 / this.#positive(token, steps) : rows.scale[index]);
    for (let k = 0; k < L; k++) {
      const step = steps[k];
      if (step === 0 || (isHop && step < 0)) continue;
      const value = step * Math.abs(step) * scale;
      if (!leftOut[k] && (k !== token - 1 || hasOwn)) sum[k] += value;
      else if (!isHop) this.apart += value;
    }
  }

  #positive(token, steps) {
    this.sums ??= new Map();
    if (!this.sums.has(token)) {
      let sum = 0;
      for (const step of steps) if (step > 0) sum += step * step;
      const own = this.hasOwn ? 0 : Math.max(0, steps[token - 1]) ** 2;
      this.sums.set(token, sum - own || 1);
    }
    return this.sums.get(token);
  }

  #follow() {
    const all = sizeOf(this.hops[0].row, 0, this.L);
    while (this.hops.length <= MOST_HOPS) {
      const weights = this.#followed(this.hops.at(-1).row);
      const sum = added([...weights.values()]);
      if (sum < LEAST * all) return;
      this.hops.push(this.#step(weights, true));
    }
  }

  // The generated tokens that support what is explained, and have rows to follow.
  #followed(row) {
    const weights = new Map();
    for (let token = this.prompt; token < this.L; token++) {
      if (row[token] > 0 && this.whole.rowOf.has(token)) weights.set(token, row[token]);
    }
    return weights;
  }

  // What every hop leaves where it is: its sum is that of the first row.
  #sumOf() {
    const sum = new Float32Array(this.L);
    this.hops.forEach(({ row }, k) => {
      const isLast = k === this.hops.length - 1;
      const isTogether = !isLast && this.hops[k + 1].ways.has(TOGETHER);
      const followed = isLast || isTogether ? new Map() : this.#followed(row);
      row.forEach((value, token) => {
        const isGone = token >= this.prompt && (isTogether || followed.has(token));
        if (!isGone) sum[token] += value;
      });
    });
    return sum;
  }

  // What each part gives, and how much that is: tokens of a part may oppose each other.
  #byUnit(row) {
    const { of, count } = this.unit;
    const [values, sizes] = [new Float32Array(count), new Float32Array(count)];
    row.forEach((value, token) => {
      values[of[token]] += value;
      sizes[of[token]] += Math.abs(value);
    });
    return { values, sizes };
  }

  // How much each part of the unit matters at any hop, or is explained.
  get weights() {
    this.weighed ??= this.hops.reduce((weights, { row }, hop) => {
      const scale = this.reached[hop] / (this.totals[hop] || 1);
      this.#byUnit(row).sizes.forEach((size, part) => { weights[part] += size * scale; });
      return weights;
    }, this.#explained());
    return this.weighed;
  }

  #explained() {
    const weights = new Float64Array(this.unit.count);
    const { ways } = this.hops[0];
    for (const part of ways.has(TOGETHER) ? this.picked : []) weights[part] += 1 / this.picked.length;
    for (const [part, parts] of ways) {
      if (part !== TOGETHER) weights[part] += added(parts.sizes) / (this.totals[0] || 1);
    }
    return weights;
  }

  // The names of the hops: "0", "1", ..., and "all" where there are several.
  get names() {
    if (this.isMissing) return ["0"];
    const names = this.hops.map((_, k) => String(k));
    return names.length > 1 ? [...names, "all"] : names;
  }

  row(hop) {
    return hop === "all" ? this.all : this.hops[Math.min(Number(hop), this.hops.length - 1)].row;
  }

  // Which share of a hop each part of the answer's text has: the prompt, the reasoning, the answer.
  shares(hop) {
    const row = this.row(hop);
    const total = sizeOf(row, 0, this.L) || 1;
    return this.whole.regions.map((region) => ({ ...region, share: sizeOf(row, region.first, region.end) / total }));
  }

  // The shares of the parts of the unit, negative where a part opposes what is explained.
  partsOf(hop) {
    const total = sizeOf(this.row(hop), 0, this.L) || 1;
    const { sizes, values } = this.#byUnit(this.row(hop));
    return sizes.map((size, part) => ((values[part] < 0 ? -1 : 1) * size) / total);
  }
}

function sizeOf(row, first, end) {
  let sum = 0;
  for (let k = first; k < end; k++) sum += Math.abs(row[k]);
  return sum;
}
