// What is shown, in words that fit into a URL: #t=12&m=mamba-lrp. Invalid values are ignored.
import { range } from "./dom.js";
import { FLOW_START, FLOW_SWITCHES } from "./flow_graph.js";
import { name } from "./format.js";
import { writeAddress } from "./host.js";

export const QUANTILES = [50, 75, 90, 95, 98, 99, 99.5, 99.9, 100];
export const LEAST_SHARES = [0, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20];
export const COUNTS = [5, 10, 20, 50];
export const ORDERS = { given: "as given", high: "likeliest first", low: "least likely first" };
export const VIEWS = { one: "One", all: "All methods", pair: "Two outputs" };
const SWITCHES = ["last", "template", "gray", "grid", "summary"];

export class State {
  constructor(data, examples, inAddress) {
    Object.assign(this, { data, examples, inAddress });
    this.read();
  }

  get defaults() {
    return {
      e: 0, // example
      find: "", // examples that hold these letters
      only: "", // examples with this answer
      sort: "given", // the order of the examples
      summary: 0, // whether what they have in common is shown
      ...this.#first(), // the explained output, or "output.answer", and what it is contrasted with
      b: "", // the second of two outputs
      m: this.data.methods[0].name,
      view: "one",
      u: this.#firstUnit(),
      q: 99.5, // the quantile with the strongest color
      min: 0, // the least share that is shown, in percent
      k: 10, // how many sources are listed
      span: this.example.whole?.opening ?? "", // of a whole answer: the tokens that are explained together
      hop: "0", // how often what lies on the answer's own words is handed on, or "all"
      own: "", // whether the reading token is shown; as it fits the example, until it is chosen
      last: 1, // whether the prompt's last token is shown
      template: 1, // whether the chat template's own tokens are shown
      map: "", // the open map
      ...FLOW_START, // of the circuit: edges, path, and the chosen node or edge
      ...FLOW_SWITCHES,
      opacity: 80,
      gray: 1, // whether the picture is gray
      grid: 1, // whether patches are outlined
      theme: "",
    };
  }

  // The page opens on the contrast that was asked for, if one was.
  #first() {
    const { outputs } = this.example;
    for (const [k, { chosen, contrasts }] of this.data.against ? outputs.entries() : []) {
      const asked = contrasts.find(([answer]) => answer === chosen);
      if (asked) return { t: String(k), n: asked[1] };
    }
    return { t: String(this.example.opening), n: -1 };
  }

  #firstUnit() {
    const { unitNames } = this.example;
    return unitNames.includes(this.data.units) ? this.data.units : unitNames[0];
  }

  get example() {
    return this.examples[this.values?.e ?? 0];
  }

  read() {
    const hash = this.inAddress ? location.hash.slice(1) : "";
    this.values = { e: 0 };
    const given = new URLSearchParams(hash);
    const index = Number(given.get("e"));
    if (this.examples[index]) this.values.e = index;
    this.values = { ...this.defaults, e: this.values.e };
    for (const [key, text] of given) {
      if (!(key in this.values) || key === "e") continue;
      this.values[key] = typeof this.values[key] === "number" ? Number(text) : text;
    }
    if (given.has("t") && !given.has("span")) this.values.span = "";
    this.correct();
  }

  // Change some values, and correct those that no longer fit.
  change(change) {
    const { example } = this;
    Object.assign(this.values, change);
    if (this.example !== example) {
      const { span, hop } = this.defaults;
      Object.assign(this.values, this.#first(), { b: "", map: "", span, hop });
    } else if ("t" in change) Object.assign(this.values, { n: -1, span: "" });
    if (change.n >= 0) this.values.span = ""; // a contrast is of one output
    if ("span" in change) this.values.hop = "0";
    if (this.example !== example || "t" in change) Object.assign(this.values, FLOW_START);
    this.correct();
    this.write();
  }

  correct() {
    const { values, defaults, example } = this;
    const allowed = {
      m: this.data.methods.map((method) => method.name),
      view: Object.keys(VIEWS),
      u: example.unitNames,
      q: QUANTILES,
      min: LEAST_SHARES,
      k: COUNTS,
      own: ["", "0", "1"],
      sort: Object.keys(ORDERS),
      map: ["", ...this.mapIds],
      theme: ["", "light", "dark"],
      ...Object.fromEntries([...SWITCHES, ...Object.keys(FLOW_SWITCHES)].map((key) => [key, [0, 1]])),
    };
    for (const [key, list] of Object.entries(allowed)) {
      if (!list.includes(values[key])) values[key] = defaults[key];
    }
    if (!(values.opacity >= 0 && values.opacity <= 100)) values.opacity = defaults.opacity;

    if (!example.pick(values.t)) values.t = defaults.t;
    this.pick = example.pick(values.t) ?? { output: 0, answer: example.outputs[0].chosen };
    this.#correctSpan(defaults);
    values.t = example.written(this.pick);
    Object.assign(values, example.circuit(this.pick)?.corrected(values) ?? FLOW_START);
    if (this.picks.length < 2 && values.view === "pair") values.view = "one";
    if (values.view === "pair") {
      values.n = -1;
      const others = this.picks.map((pick) => example.written(pick));
      if (!example.pick(values.b)) {
        values.b = others.find((other) => other !== values.t) ?? values.t;
      }
    }
    this.second = example.pick(values.b);
    const contrasts = example.contrasts(this.pick);
    if (!contrasts.includes(values.n)) values.n = contrasts[0] ?? -1;
  }

  // A span of a whole answer, and its hops; a span of one token chooses that output as well.
  #correctSpan(defaults) {
    const { values, example } = this;
    const { whole, outputs } = example;
    const isPair = values.view === "pair" && this.picks.length > 1; // outputs are compared one by one
    const span = !isPair && values.span && (whole?.span(values.span) ?? whole?.span(defaults.span));
    this.span = span || (outputs[this.pick.output].part ?? null);
    values.span = this.span ? this.span.join("-") : "";
    if (this.isOneToken) this.pick = example.pick(String(example.outputAt.get(this.span[0]))) ?? this.pick;
    if (!this.#hops.includes(values.hop)) values.hop = "0";
  }

  write() {
    if (!this.inAddress) return;
    const { values, defaults } = this;
    const changed = Object.entries(values).filter(
      ([key, value]) => (value !== defaults[key] && !(key === "b" && values.view !== "pair"))
        || (key === "span" && value && values.t !== defaults.t),
    );
    writeAddress(changed);
  }

  // Whether the picked span is one token, which has answers of its own to choose from.
  get isOneToken() {
    return Boolean(this.span) && this.span[1] - this.span[0] === 1 && this.example.outputAt.has(this.span[0]);
  }

  get #hops() {
    return this.span ? this.trace(this.method).names : ["0"];
  }

  // The hops of the picked span of a whole answer.
  trace(method) {
    return this.example.whole.trace(method.name, this.span, this.values.u, { hasOwn: this.showsOwn, hasTemplate: this.values.template === 1 });
  }

  // Whether the token that the answer is read from is shown like the others.
  get showsOwn() {
    return this.values.own ? this.values.own === "1" : this.#ownAtFirst;
  }

  get #ownAtFirst() {
    const { example, span } = this;
    return example.opensWithOwn || Boolean(span && example.whole.hasHops(span));
  }

  // How the address says so; nothing where the example has it so by itself.
  writtenOwn(isShown) {
    return isShown === this.#ownAtFirst ? "" : String(Number(isShown));
  }

  get method() {
    return this.data.methods.find((method) => method.name === this.values.m);
  }

  get unit() {
    return this.example.units[this.values.u];
  }

  get views() {
    const offered = {
      one: true, all: this.data.methods.length > 1, pair: this.picks.length > 1,
    };
    return Object.keys(VIEWS).filter((view) => offered[view]);
  }

  // The examples that are listed, in their order.
  get listed() {
    const { find, only, sort } = this.values;
    const wanted = find.trim().toLowerCase();
    const listed = range(this.examples.length).filter((k) => {
      const example = this.examples[k];
      return (!only || name(example.first.text) === only)
        && (!wanted || example.name.toLowerCase().includes(wanted)
          || example.plainText.toLowerCase().includes(wanted));
    });
    const sign = { given: 0, high: -1, low: 1 }[sort];
    const p = (k) => this.examples[k].first.p ?? this.examples[k].first.logit;
    return sign ? listed.sort((a, b) => sign * (p(a) - p(b))) : listed;
  }

  // What can be explained: the outputs, or the answers of an only one.
  get picks() {
    const { example } = this;
    if (example.outputs.length === 1) return example.picks(0);
    return example.outputs.map(({ part }, k) => !part && example.pick(String(k))).filter(Boolean);
  }

  get mapIds() {
    const { example } = this;
    const isOut = example.outputs.length > 1 && example.isText
      && example.outputs.every(({ position }) => position !== null);
    const own = isOut ? ["out"] : [];
    return [...own, ...example.layers.map(({ id }) => id)];
  }
}
