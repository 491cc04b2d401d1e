// The page: reads the data, draws the present state, and changes it on request.
import { Answer } from "./answer.js";
import { WholeAnswer } from "./answer_trace.js";
import { Check } from "./check.js";
import { Slider } from "./controls.js";
import { Colors } from "./colors.js";
import { Common } from "./common.js";
import { Example, limit } from "./data.js";
import { clamp, element, hasModifier } from "./dom.js";
import { Examples } from "./examples.js";
import { visible } from "./format.js";
import { Flow } from "./flow.js";
import { Help } from "./help.js";
import { hostIsDark, themeButton, watchHost } from "./host.js";
import { Legend } from "./legend.js";
import { Lens } from "./lens.js";
import { Maps } from "./maps.js";
import { Panels } from "./panels.js";
import { Picks } from "./picks.js";
import { Question } from "./question.js";
import { Reading } from "./reading.js";
import { Settings } from "./settings.js";
import { Sources } from "./sources.js";
import { LEAST_SHARES, QUANTILES, State } from "./state.js";
import { Tip } from "./tip.js";

// Draw an explanation into an element. `whole`: it is all of a document, whose URL has the state.
export async function openPage(parent, data, { whole }) {
  const examples = await Promise.all(data.examples.map((example) => Example.unpack(example)));
  examples.forEach((example, k) => {
    const { whole } = data.examples[k];
    if (whole) example.whole = new WholeAnswer(example, whole);
  });
  const page = new Page(data, examples, whole);
  parent.append(page.root);
  page.start();
  return () => page.dispose();
}

const WITHOUT_CIRCUIT = { node: null, owns: () => false, update: () => {} };
const WITHOUT_ANSWER = { node: null, attach: () => {}, update: () => {}, step: () => {} };

class Page {
  constructor(data, examples, whole) {
    Object.assign(this, { data, examples, whole });
    this.state = new State(data, examples, whole);
    this.pointed = -1;
    this.isPrinting = false;
    this.isReady = false;
    this.stopped = new AbortController();
    // In a notebook, a click anywhere gives the page the keyboard, or its keys would be commands.
    this.root = element("div", { class: whole ? "captum-page whole" : "captum-page", lang: "en",
      tabindex: whole ? null : -1, "data-lm-suppress-shortcuts": "true" });
    this.#build();
  }

  start() {
    this.#listen();
    this.update();
    this.isReady = true;
  }

  dispose() {
    this.stopped.abort();
    this.maps.dispose();
    this.panels.dispose();
  }

  set(change) {
    this.state.change(change);
    if (this.flow.owns(change)) this.flow.update(this.state);
    else this.update();
  }

  // The parts that never change.
  #build() {
    const { data } = this;
    const set = (key) => (value) => this.set({ [key]: value });
    this.about = element("span", { class: "quiet" });
    this.themeButton = themeButton({ "data-word": "theme" }, () => this.#flipTheme());
    this.help = new Help(data);
    const helpButton = element("button", { type: "button", "data-word": "help",
      "aria-label": "Words, marks and keys", onclick: () => this.help.show() }, "?");
    this.tip = new Tip(this.root, this.stopped.signal);
    this.live = element("div", { class: "aloud", "aria-live": "polite" });

    this.list = new Examples(this);
    this.common = new Common(this);
    this.question = new Question();
    this.picks = new Picks(this);
    // A page without a circuit comes without the scripts that draw one.
    this.flow = data.examples.some(({ circuits }) => circuits.length) ? new Flow(this) : WITHOUT_CIRCUIT;
    this.answer = data.examples.some(({ whole }) => whole) ? new Answer(this) : WITHOUT_ANSWER;
    this.settings = new Settings(this);
    this.panels = new Panels(this);
    this.reading = new Reading(this);
    this.legend = new Legend();
    this.quantile = new Slider("color", QUANTILES, strongest, set("q"));
    this.least = new Slider("least", LEAST_SHARES, (value) => (value ? `${value}%` : "nothing"), set("min"));
    this.sources = new Sources(this);
    this.maps = new Maps(this);
    this.lens = new Lens();
    this.check = new Check(this);

    this.main = element("main", {},
      element("header", { class: "top" }, element("h1", {}, visible(data.title)), this.about,
        element("div", { class: "tools" }, this.themeButton, helpButton)),
      this.list.node,
      element("div", { class: "body" }, this.common.node, this.question.node, this.picks.node,
        this.answer.node, this.flow.node, this.settings.node,
        element("div", { class: "work" }, this.panels.node,
          element("aside", { "aria-label": "Scale and largest sources" },
            element("div", {}, this.legend.node, this.quantile.node, this.least.node),
            this.sources.node),
          element("div", { class: "below" }, this.check.node, this.maps.node,
            this.lens.node))));
    this.root.append(this.main, this.tip.node, this.live, this.help.node);
  }

  #listen() {
    const { signal } = this.stopped;
    const keys = this.whole ? document : this.root;
    keys.addEventListener("keydown", (event) => this.#key(event), { signal });
    if (this.whole) {
      addEventListener("hashchange", () => {
        this.state.read();
        this.update();
      }, { signal });
    }
    watchHost(() => this.update(), signal);
    this.root.addEventListener("pointerdown", ({ target }) => {
      if (!this.panels.node.contains(target)) this.point(-1);
    }, { signal });
    let width = this.root.getBoundingClientRect().width;
    const resized = new ResizeObserver(() => {
      const now = this.root.getBoundingClientRect().width;
      if (now === width) return;
      width = now;
      this.maps.resize();
      this.update();
    });
    resized.observe(this.root);
    signal.addEventListener("abort", () => resized.disconnect());
    for (const [event, isPrinting] of [["beforeprint", true], ["afterprint", false]]) {
      addEventListener(event, () => {
        this.isPrinting = isPrinting;
        if (isPrinting) this.panels.print();
        this.update();
      }, { signal });
    }
  }

  #key(event) {
    if (hasModifier(event)) return;
    // What is pressed in a widget is not for the notebook around it.
    if (!this.whole) event.stopPropagation();
    const { type, tagName } = event.target;
    const isTyping = type === "search" || tagName === "SELECT";
    if (!this.help.hasLetters || this.help.isOpen || isTyping) return;
    const act = this.#actions()[event.key];
    if (!act) return;
    act();
    event.preventDefault();
  }

  #actions() {
    const { state } = this;
    const { values, example } = state;
    const next = (key, list, step = 1) => {
      if (!list.length) return;
      const at = list.indexOf(values[key]);
      this.set({ [key]: list[(at + step + list.length) % list.length] });
    };
    const quantile = (step) => {
      const k = clamp(QUANTILES.indexOf(values.q) + step, 0, QUANTILES.length - 1);
      this.set({ q: QUANTILES[k] });
    };
    return {
      m: () => next("m", this.data.methods.map((method) => method.name)),
      v: () => next("view", state.views),
      x: () => values.view !== "pair" && next("n", example.contrasts(state.pick)),
      u: () => next("u", example.unitNames),
      o: () => this.set({ own: state.writtenOwn(!state.showsOwn) }),
      h: () => this.answer.step(1),
      H: () => this.answer.step(-1),
      t: () => example.turns && this.set({ template: 1 - values.template }),
      l: () => next("map", ["", ...state.mapIds]),
      e: () => next("e", state.listed),
      E: () => next("e", state.listed, -1),
      "/": () => this.list.search(),
      d: () => this.#flipTheme(),
      "[": () => quantile(-1),
      "]": () => quantile(1),
      "?": () => this.help.show(),
      Escape: () => this.point(-1),
    };
  }

  #flipTheme() {
    const hosts = hostIsDark() ? "dark" : "light";
    const flipped = this.theme === "dark" ? "light" : "dark";
    this.set({ theme: flipped === hosts ? "" : flipped }); // and follows the host again
  }

  // Drawing.

  update() {
    const { state } = this;
    this.#updateTheme();
    this.point(-1);
    this.view = this.#derive();
    this.#updateAbout();
    this.list.update(state);
    this.common.update(state);
    this.question.update(state);
    this.picks.update(state);
    this.answer.update(state);
    this.flow.update(state);
    this.settings.update(state);
    this.quantile.show(state.values.q);
    this.least.show(state.values.min);
    this.panels.update(this.view);
    this.legend.update(this.view, this.colors);
    this.sources.update(this.view);
    this.maps.update(this.view);
    this.lens.update(this.view);
    this.check.update(this.view);
  }

  #updateTheme() {
    const preferred = this.state.values.theme || (hostIsDark() ? "dark" : "light");
    this.theme = this.isPrinting ? "light" : preferred;
    if (this.root.dataset.theme === this.theme) return;
    this.root.dataset.theme = this.theme;
    this.themeButton.setAttribute("aria-pressed", String(this.theme === "dark"));
    this.colors = new Colors(this.root);
  }

  // All that follows from the state: which panels there are, with which relevance and scale.
  #derive() {
    const { state } = this;
    const { example, unit, method, pick, second, values } = state;
    const hidden = { own: !state.showsOwn, last: !values.last, template: !values.template, share: values.min / 100 };
    const panel = (method, pick, more) => ({
      method, pick, against: values.n,
      relevance: state.span ? example.relevanceOfSpan(method, state.trace(method), state.span, values.hop, unit, hidden)
        : example.relevance(method, pick, values.n, unit, hidden), ...more,
    });
    const panels = {
      one: () => [panel(method, pick)],
      all: () => this.data.methods.map((each) => panel(each, pick)),
      pair: () => [
        panel(method, pick, { other: second }),
        panel(method, second, { other: pick, isSecond: true }),
      ],
    }[values.view]();
    const listed = values.view === "all" ? panels.filter((each) => each.method === method) : panels;
    const common = limit(listed.map(({ relevance }) => relevance), values.q);
    for (const each of panels) {
      // Units of methods differ, and so do their scales.
      each.limit = values.view === "all" ? limit([each.relevance], values.q) : common;
    }
    return { state, example, unit, panels, listed, limit: common };
  }

  #updateAbout() {
    const { data } = this;
    const { example } = this.state;
    const outputs = example.outputs.length;
    this.about.textContent = [
      visible(data.model),
      ...(data.methods.length === 1 ? [visible(data.methods[0].title)] : []),
      example.sizeName,
      ...(outputs > 1 ? [`${outputs} outputs explained`] : []),
    ].join(" · ");
    this.main.classList.toggle("listed", this.examples.length > 1);
  }

  // The part that is pointed at: in every panel, in the list, in the map, and in words.
  point(part, panel = null, { aloud = false } = {}) {
    if (part === this.pointed && !aloud) return;
    const before = this.pointed;
    this.pointed = part;
    this.panels.mark(part, before);
    this.sources.mark(part, before);
    this.maps.viewer.draw();
    const anchor = part >= 0 && panel?.anchor(part);
    if (!anchor) {
      this.tip.hide();
      return;
    }
    // The controls above the text stay free.
    this.tip.show(anchor, this.reading.content(part), this.panels.top);
    if (!aloud) return;
    this.live.textContent = this.tip.node.textContent;
    panel.describe(part, this.reading.words(part));
  }

  reveal(part) {
    this.panels.reveal(part);
    this.point(part, this.panels.first, { aloud: true });
  }
}

// Which values have the strongest color, for a quantile in percent.
function strongest(value) {
  return value === 100 ? "largest only" : `largest ${Number((100 - value).toFixed(1))}%`;
}
