// The explanation: examples, their parts, and the relevance of each part for an answer.
import { added, range } from "./dom.js";
import { FlowGraph } from "./flow_graph.js";
import { count, listed, plain, visible } from "./format.js";

const TEMPLATE = "template"; // the turn of what no message says

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

// Rows of numbers: a value is step * |step| * scale of its row.
export class Rows {
  static async unpack({ shape, scale, data }) {
    return new Rows(shape, scale, new Int16Array(await inflate(data)));
  }

  constructor([count, width], scale, steps) {
    Object.assign(this, { count, width, scale, steps });
  }

  row(index) {
    const steps = this.steps.subarray(index * this.width, (index + 1) * this.width);
    return Float32Array.from(steps, (step) => step * Math.abs(step) * this.scale[index]);
  }
}

// A way to divide the sources, tokens or pixels, into parts: `of` is the part of each source.
class Unit {
  constructor(name, of, count) {
    Object.assign(this, { name, of, count });
  }

  // The sources of each part, where they are neighbors.
  static spans(name, ends, names) {
    const of = new Uint32Array(ends.at(-1) ?? 0);
    const unit = new Unit(name, of, ends.length);
    unit.bounds = ends.map((end, part) => [ends[part - 1] ?? 0, end]);
    unit.names = names;
    unit.bounds.forEach(([first, end], part) => of.fill(part, first, end));
    return unit;
  }
}

// An image or a sound among the tokens of a text: `tokens` row by row of its grid, if that is known.
class Picture {
  constructor({ name, tokens, grid, note }, index) {
    Object.assign(this, { name, tokens, note, index, isGrid: Boolean(grid), pixels: null });
    [this.rows, this.columns] = grid ?? [1, tokens.length];
  }
}

// A text, an image or a series. `rows` holds the relevance by method, one row per explained answer.
export class Example {
  static async unpack(data) {
    const example = new Example(data);
    const rows = Object.entries(data.rows).map(async ([name, packed]) => {
      example.rows[name] = await Rows.unpack(packed);
    });
    if (data.image) {
      rows.push(inflate(data.image.data).then((buffer) => {
        example.pixels = { size: data.image.size, data: new Uint8Array(buffer) };
      }));
    }
    for (const [k, { image }] of (data.pictures ?? []).entries()) {
      if (image) rows.push(inflate(image.data).then((buffer) => {
        example.pictures[k].pixels = { size: image.size, data: new Uint8Array(buffer) };
      }));
    }
    if (data.series) {
      rows.push(Rows.unpack(data.series).then((series) => {
        example.series = range(series.count).map((feature) => series.row(feature));
      }));
    }
    await Promise.all(rows);
    return example;
  }

  constructor(data) {
    const { name, outputs, deltas, maps, tokens = [], unknown = [], special = [], prompt = 0 } = data;
    Object.assign(this, { name, outputs, deltas, tokens, prompt, maps, rows: {} });
    this.check = data.validation;
    this.readsMost = data.opening ?? null; // where the page of an answer of several tokens opens
    this.circuits = (data.circuits ?? []).map((circuit) => new FlowGraph(circuit));
    this.special = new Set(special);
    this.unknown = new Map(unknown); // what the model reads in place of unknown words
    this.isImage = Boolean(data.image);
    this.isSeries = Boolean(data.series);
    this.isTable = this.isSeries && data.table;
    this.isText = !this.isImage && !this.isSeries;
    // Images and sound among the tokens of a text, and by token which of them it is, and where in it.
    this.pictures = (data.pictures ?? []).map((picture, k) => new Picture(picture, k));
    this.inPictures = new Map(this.pictures.flatMap((picture) =>
      picture.tokens.map((token, cell) => [token, { picture, cell }])));
    this.features = data.features;
    this.size = data.size;
    this.grid = data.grid;
    this.frames = data.frames ?? 1;
    this.units = this.isImage ? this.#imageUnits()
      : this.isSeries ? this.#seriesUnits() : this.#textUnits(data.units);
    // Units that are all of the input, or as small as its tokens, would change nothing.
    const [[first, { count: finest }]] = Object.entries(this.units);
    this.unitNames = Object.keys(this.units).filter((name) =>
      name === first || (this.units[name].count > 1 && this.units[name].count !== finest));
    this.turns = this.units.turn;
    // The output whose answer stands at a token; of several that of the first.
    this.outputAt = new Map();
    outputs.forEach(({ chosen, part }, k) => {
      if (part) return;
      const [first, end] = this.standing({ output: k, answer: chosen }) ?? [0, 0];
      for (let token = first; token < end; token += 1) {
        if (!this.outputAt.has(token)) this.outputAt.set(token, k);
      }
    });
    // An answer of several tokens, explained as a whole: only pages that have one come with its scripts.
    this.whole = null;
    this.layers = maps.flatMap((group, g) => group.layers.map((layer, k) => ({
      id: `${g}.${k}`, group, layer, data: null,
    })));
  }

  // The circuit of an answer, if it was computed.
  circuit({ output, answer }) {
    const { position, answers } = this.outputs[output];
    return this.circuits.find((graph) => [null, graph.at].includes(position) && graph.answer === answers[answer].text);
  }

  #textUnits(units) {
    const ends = range(this.tokens.length).map((k) => k + 1);
    const all = { token: Unit.spans("token", ends, []) };
    for (const [name, { ends, names }] of Object.entries(units)) {
      all[name] = Unit.spans(name, ends, names);
    }
    return all;
  }

  // Patches may reach over several frames of a video; an image has one frame.
  #imageUnits() {
    const { frames, size: [below, width] } = this;
    const height = below / frames;
    const divided = (name, slices, rows, columns) => {
      const of = Uint32Array.from({ length: below * width }, (_, pixel) => {
        const y = Math.floor(pixel / width);
        const slice = Math.floor((Math.floor(y / height) * slices) / frames);
        const row = Math.floor(((y % height) * rows) / height);
        return (slice * rows + row) * columns + Math.floor(((pixel % width) * columns) / width);
      });
      return Object.assign(new Unit(name, of, slices * rows * columns), { slices, rows, columns });
    };
    const pixel = divided("pixel", frames, height, width);
    const all = this.grid ? { patch: divided("patch", ...this.grid), pixel } : { pixel };
    return frames > 1 ? { ...all, frame: divided("frame", frames, 1, 1) } : all;
  }

  // The sources of a series are its numbers, time step by time step.
  #seriesUnits() {
    const [steps, features] = this.size;
    const numbers = range(steps * features);
    const unit = (name, of, count) => new Unit(name, Uint32Array.from(numbers, of), count);
    return {
      value: unit("value", (k) => k, numbers.length),
      step: unit("step", (k) => Math.floor(k / features), steps),
      feature: unit("feature", (k) => k % features, features),
    };
  }

  // The answer that is explained where the page opens.
  get first() {
    const pick = this.pick(String(this.opening));
    return pick ? this.answer(pick) : this.outputs[0].answers[0];
  }

  get plainText() {
    this.joined ??= this.text(0, this.tokens.length);
    return this.joined;
  }

  get sizeName() {
    if (this.isImage) {
      const [below, width] = this.pixels.size;
      const pixels = `${width} × ${below / this.frames} pixels`;
      return this.frames > 1 ? `${count(this.frames, "frame")} of ${pixels}` : pixels;
    }
    if (!this.isSeries) {
      const all = count(this.tokens.length, "token");
      return this.inPictures.size ? `${all}, ${this.inPictures.size.toLocaleString("en")} of them of ${listed(this.pictures.map(({ name }) => name))}` : all;
    }
    if (this.isTable) return count(this.size[1], "feature");
    return `${count(this.size[0], "time step")} of ${count(this.size[1], "feature")}`;
  }

  get answersAre() {
    if (this.outputs.every(({ answers }) => answers.every(({ p }) => p === null))) return "Outputs";
    const roles = new Set(this.outputs.map(({ role }) => role));
    if (roles.has("label")) return "Labels";
    if (roles.has("span")) return "Answers";
    return this.outputs.every(({ position }) => position === null) ? "Classes" : "Answers here";
  }

  // What a part is called where it is not a stretch of text.
  placeName(unit, part) {
    if (this.isImage) {
      const { slices, rows, columns } = unit;
      const slice = Math.floor(part / (rows * columns));
      const [first, end] = [slice, slice + 1].map((k) => Math.ceil((k * this.frames) / slices));
      const frame = end - first > 1 ? `frames ${first}–${end - 1}` : `frame ${first}`;
      const place = `row ${Math.floor(part / columns) % rows}, column ${part % columns}`;
      if (this.frames === 1) return place;
      return unit.name === "frame" ? frame : `${frame}, ${place}`;
    }
    const count = this.features.length;
    if (unit.name === "feature") return visible(this.features[part]);
    if (unit.name === "step") return `step ${part}`;
    const feature = visible(this.features[part % count]);
    return this.isTable ? `${feature} = ${plain(this.valueAt(part))}`
      : `${feature}, step ${Math.floor(part / count)}`;
  }

  // The number of a series at a place.
  valueAt(source) {
    const count = this.features.length;
    return this.series[source % count][Math.floor(source / count)];
  }

  // The tokens where an answer stands, the first and the one after the last: it follows the token
  // that it is read from, is its label, or is a part of the text.
  standing({ output, answer }) {
    const { position, role, answers, part } = this.outputs[output];
    if (part || answers[answer].at) return part ?? answers[answer].at;
    if (position === null) return null;
    return role === "label" ? [position, position + 1] : [position + 1, position + 2];
  }

  // Whether the token that the answer is read from is shown where the page opens: it is the word
  // that is labeled, or a classifier reads from it, and it says something.
  get opensWithOwn() {
    return this.isLabeled || this.outputs.some(({ readAt, apart }) => readAt !== null && !apart);
  }

  get isLabeled() {
    return this.outputs.every(({ role }) => role === "label");
  }

  // The first label that is not the one of most tokens: they are labels of nothing.
  get #firstLabel() {
    const texts = this.outputs.map(({ answers, chosen }) => answers[chosen].text);
    const number = (text) => texts.filter((each) => each === text).length;
    const usual = texts.reduce((most, text) => (number(text) > number(most) ? text : most));
    return Math.max(0, texts.findIndex((text) => text !== usual));
  }

  // The page opens where there is something to read: after the prompt, or late enough in it.
  get opening() {
    if (this.isLabeled) return this.#firstLabel;
    if (this.readsMost !== null) return this.readsMost;
    const positions = this.outputs.map(({ position }) => position);
    if (positions.every((position) => position === null)) return 0;
    const isExplained = (k) => this.pick(String(k)) !== null;
    const after = positions.findIndex((position, k) => position >= this.prompt - 1 && isExplained(k));
    return after >= 0 ? after : Math.max(0, positions.findLastIndex((_, k) => isExplained(k)));
  }

  // An image is named once, where its tokens begin.
  text(first, end, isShown = () => true) {
    const texts = this.tokens.slice(first, end);
    return texts.map((text, k) => {
      const name = this.inPictures.get(first + k)?.picture.name;
      if (name) return k && name === this.inPictures.get(first + k - 1)?.picture.name ? "" : ` [${name}] `;
      return isShown(first + k) ? text : " ";
    }).join("");
  }

  partText(unit, part) {
    const [first, end] = unit.bounds[part];
    const { picture } = this.inPictures.get(first) ?? {};
    if (picture) return end - first > 1 ? picture.name : this.tokens[first];
    return this.text(first, end);
  }

  // The image that a part is of, or is in.
  pictureOf(unit, part) {
    return this.inPictures.get(unit.bounds[part][0])?.picture;
  }

  // What the model reads in place of a word of this part that the tokenizer does not know.
  readAs(unit, part) {
    const [first, end] = unit.bounds[part];
    return range(end - first).map((k) => this.unknown.get(first + k)).find(Boolean);
  }

  // The name of the turn that a part lies in.
  turnOf(unit, part) {
    return this.turns?.names[this.turns.of[unit.bounds[part][0]]];
  }

  isTemplate(token) {
    return this.turns?.names[this.turns.of[token]] === TEMPLATE;
  }

  // The parts that no message says: all of their tokens are the chat template's.
  template(unit) {
    const said = new Set(range(this.tokens.length).filter((k) => !this.isTemplate(k)).map((k) => unit.of[k]));
    return range(unit.count).filter((part) => !said.has(part));
  }

  // A pick is an answer of an output. It is written "3", or "3.1" if not the chosen answer.
  pick(written) {
    const match = /^(\d+)(?:\.(\d+))?$/.exec(written);
    const output = match && this.outputs[Number(match[1])];
    if (!output) return null;
    const answer = match[2] === undefined ? this.#first(output) : Number(match[2]);
    const pick = { output: Number(match[1]), answer };
    return output.answers[answer] && this.#explained(pick) ? pick : null;
  }

  #first(output) {
    if (output.answers[output.chosen]?.row !== null) return output.chosen;
    const contrast = output.contrasts.find(([answer]) => answer === output.chosen);
    if (contrast) return output.chosen;
    return Math.max(0, output.answers.findIndex((answer) => answer.row !== null));
  }

  #explained({ output, answer }) {
    const { answers, contrasts } = this.outputs[output];
    return answers[answer].row !== null || contrasts.some((contrast) => contrast[0] === answer);
  }

  // What an output is about, where its answer does not tell.
  about({ position, role }) {
    return { label: this.tokens[position], span: "answer", start: "start", end: "end" }[role];
  }

  written({ output, answer }) {
    return answer === this.#first(this.outputs[output]) ? `${output}` : `${output}.${answer}`;
  }

  answer({ output, answer }) {
    return this.outputs[output].answers[answer];
  }

  // Every answer of an output that can be explained by itself or against another.
  picks(output) {
    return range(this.outputs[output].answers.length)
      .map((answer) => ({ output, answer }))
      .filter((pick) => this.#explained(pick));
  }

  // Where the rows of "this answer, not that one" are: one row, or the difference of two.
  terms({ output, answer }, against) {
    const { answers, contrasts } = this.outputs[output];
    if (against < 0) {
      const { row } = answers[answer];
      return row === null ? null : [[row, 1]];
    }
    for (const [first, second, row] of contrasts) {
      if (first === answer && second === against) return [[row, 1]];
      if (first === against && second === answer) return [[row, -1]];
    }
    const [a, b] = [answers[answer], answers[against]];
    if (!a || !b || answer === against || a.row === null || b.row === null) return null;
    return [[a.row, 1], [b.row, -1]];
  }

  // The answers that a pick can be contrasted with; -1 is none.
  contrasts(pick) {
    const answers = range(this.outputs[pick.output].answers.length);
    return [-1, ...answers].filter((against) => this.terms(pick, against));
  }

  relevance(method, pick, against, unit, hidden) {
    const terms = this.terms(pick, against);
    const rows = this.rows[method.name];
    const { position, readAt } = this.outputs[pick.output];
    const delta = this.deltas[method.name];
    return new Relevance(this, unit, hidden, {
      rows: rows && terms?.map(([row, sign]) => [rows.row(row), sign]), position, readAt,
      score: (sum) => (delta && terms ? terms.reduce((all, [row, sign]) => all + sign * delta[row], sum) : null),
    });
  }

  // What a span of the answer rests on, at a hop.
  relevanceOfSpan(method, trace, span, hop, unit, hidden) {
    return new Relevance(this, unit, { ...hidden, own: false, last: false }, {
      rows: trace.isMissing ? null : [[trace.row(hop), 1]], position: null, readAt: null, last: span[1] - 2,
      apart: hop === "0" && !trace.isMissing ? trace.apart : 0,
      score: (sum) => (hop === "0" ? this.whole.score(method.name, span, sum) : null),
    });
  }
}

// The relevance of each part, and its share of what is shown.
class Relevance {
  constructor(example, unit, hidden, { rows, position, readAt, score, apart = 0, last = position ?? unit.of.length - 1 }) {
    this.apart = apart; // what reading tokens have in the rows of several tokens, where they are hidden
    this.values = new Float32Array(unit.count);
    this.position = position;
    this.isMissing = !rows;
    this.isDirect = rows?.length === 1;
    // Later tokens are not read, unless the model reads in both directions.
    for (const [row, sign] of rows ?? []) {
      row.forEach((value, source) => {
        this.values[unit.of[source]] += sign * value;
        if (value) last = Math.max(last, source);
      });
    }
    this.read = unit.of[last];
    this.own = position === null && readAt === null ? -1 : unit.of[position ?? readAt];
    this.hidden = new Set();
    // A sentence is not hidden because a classifier reads its answer from the full stop.
    const isAlone = position !== null || (this.own >= 0 && unit.bounds[this.own].reduce((a, b) => b - a) === 1);
    if (hidden.own && isAlone) this.hidden.add(this.own);
    this.gone = new Set(hidden.template && example.turns ? example.template(unit) : []);
    for (const part of this.gone) this.hidden.add(part);
    if (hidden.last && example.prompt) this.hidden.add(unit.of[example.prompt - 1]);

    const parts = range(this.read + 1);
    const size = (part) => Math.abs(this.values[part]);
    this.sum = parts.reduce((sum, part) => sum + this.values[part], apart);
    this.everything = parts.reduce((sum, part) => sum + size(part), Math.abs(apart)) || 1;
    this.ownShare = this.own < 0 ? 0 : size(this.own) / this.everything;
    const shown = parts.filter((part) => !this.hidden.has(part));
    this.total = added(shown, size) || 1;
    this.shown = shown.length;
    const least = hidden.share * this.total;
    this.order = shown.filter((part) => size(part) >= least).sort((a, b) => size(b) - size(a));
    this.ranks = new Map(this.order.map((part, rank) => [part, rank]));
    this.score = this.isMissing ? null : score(this.sum);
  }

  has(part) {
    return this.ranks.has(part);
  }

  // The share that several parts have of what is shown, and their sum.
  of(parts) {
    const shown = parts.filter((part) => part <= this.read && !this.hidden.has(part));
    return {
      share: added(shown, (part) => this.share(part)),
      sum: added(shown, (part) => this.values[part]),
    };
  }

  share(part) {
    return Math.abs(this.values[part]) / this.total;
  }

  // Where keys lead from a part: to the next smaller one and the next larger one, or stay at `at`.
  steps(part, at) {
    const rank = this.ranks.get(part) ?? -1;
    return { n: this.order[rank + 1] ?? at, N: this.order[Math.max(0, rank - 1)] ?? at };
  }
}

// The magnitude below which a share of all values lies, between neighbors as numpy has it.
export function quantile(values, percentage) {
  if (!values.length) return 0;
  const sorted = Float32Array.from(values, Math.abs).sort();
  const rank = ((sorted.length - 1) * percentage) / 100;
  const below = sorted[Math.floor(rank)];
  return below + (sorted[Math.ceil(rank)] - below) * (rank - Math.floor(rank));
}

// The magnitude with the strongest color, for relevances on one scale.
export function limit(relevances, percentage) {
  const values = relevances.flatMap(({ order, values }) => order.map((part) => values[part]));
  return quantile(values, percentage) || quantile(values, 100) || 1;
}
