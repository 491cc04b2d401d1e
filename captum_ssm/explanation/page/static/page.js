// The page: reads the data, draws the present state, and changes it on request.
import { Choice, Slider, Toggle } from "./controls.js";
import { Colors } from "./colors.js";
import { Example, limit } from "./data.js";
import { clamp, element, fill, hasModifier } from "./dom.js";
import { count, name, percent, plain, quoted, signed, token, visible } from "./format.js";
import { ImagePanel } from "./image.js";
import { Legend } from "./legend.js";
import { Lens } from "./lens.js";
import { Maps } from "./maps.js";
import { Sources } from "./sources.js";
import { LEAST_SHARES, QUANTILES, State, VIEWS } from "./state.js";
import { TextPanel } from "./text.js";

const DARK = "(prefers-color-scheme: dark)";
const KEYS = [
  ["← → Home End", "in a group: choose; in the text or a map: move"],
  ["n N", "in the text or picture: the next, the previous largest source"],
  ["Enter", "on an output in the text, or its row in a map: explain it"],
  ["p, Shift + click", "on an output: pin it as B and compare"],
  ["x", "contrast with the next answer"],
  ["m", "next method"],
  ["v", "view: one method, all methods, two outputs"],
  ["u", "next unit: tokens, words, …"],
  ["o", "own share shown or hidden"],
  ["[ ]", "strongest color at a smaller, a larger value"],
  ["l", "next map"],
  ["+ − 0 Esc", "in a map: zoom, whole map, close"],
  ["e", "next example"],
  ["d", "dark or light"],
  ["?", "this list"],
];
const UNITS = {
  token: "Token", word: "Word", sentence: "Sentence", span: "Part", patch: "Patch", pixel: "Pixel",
};

// Draw an explanation into an element. `whole`: it is all of a document, whose URL has the state.
export async function openPage(parent, data, { whole }) {
  const examples = await Promise.all(data.examples.map((example) => Example.unpack(example)));
  const page = new Page(data, examples, whole);
  parent.append(page.root);
  page.start();
  return () => page.dispose();
}

class Page {
  constructor(data, examples, whole) {
    Object.assign(this, { data, examples, whole });
    this.state = new State(data, examples, whole);
    this.pointed = -1;
    this.panels = [];
    this.isPrinting = false;
    this.stopped = new AbortController();
    this.root = element("div", { class: whole ? "captum-page whole" : "captum-page", lang: "en",
      "data-lm-suppress-shortcuts": "true" });
    this.#build();
  }

  start() {
    this.#listen();
    this.update();
  }

  dispose() {
    this.stopped.abort();
    this.maps.dispose();
    for (const { drawn } of this.panels) drawn.dispose();
  }

  set(change) {
    this.state.change(change);
    this.update();
  }

  // The parts that never change.
  #build() {
    const { data } = this;
    const set = (key) => (value) => this.set({ [key]: value });
    this.about = element("span", { class: "quiet" });
    this.themeButton = element("button", { type: "button", title: "Dark or light (d)",
      "aria-label": "Dark mode", onclick: () => this.#flipTheme() }, "◐");
    this.help = this.#helpDialog();
    const helpButton = element("button", { type: "button", title: "Keyboard (?)",
      "aria-label": "Keyboard and details", onclick: () => this.help.showModal() }, "?");

    this.exampleChoice = new Choice("Examples", set("e"), { kind: "examples" });
    this.question = element("h2", { class: "question" });
    this.facts = element("p", { class: "quiet" });
    const choose = (value, event) => this.#choose(value, event);
    this.outputs = new Choice("Outputs", choose, { kind: "chips" });
    this.outputs.group.addEventListener("keydown", (event) => {
      if (event.key !== "p" || hasModifier(event)) return;
      this.set({ view: "pair", b: event.target.dataset.value });
      event.stopPropagation();
    });
    this.answers = new Choice("Answers", choose, { kind: "answers" });
    this.contrast = new Choice("Contrast with", set("n"));
    this.clicks = new Choice("A click sets", (isSecond) => {
      this.setsSecond = isSecond;
      this.update();
    });
    this.setsSecond = false;

    this.method = new Choice("Method", set("m"));
    this.views = new Choice("View", set("view"));
    this.units = new Choice("Units", set("u"));
    this.own = new Toggle("Own share", (isHidden) => this.set({ own: isHidden ? 0 : 1 }));
    this.last = new Toggle("Prompt's last", (isHidden) => this.set({ last: isHidden ? 0 : 1 }));
    this.hiding = element("div", { class: "field" }, element("span", { class: "label" }, "Hide"),
      this.own.node, this.last.node);
    this.grid = new Toggle("Grid", (isShown) => this.set({ grid: isShown ? 1 : 0 }));
    this.opacity = new Slider("Opacity", [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100],
      (value) => `${value}%`, set("opacity"));

    this.stage = element("div", { class: "stage" });
    this.legend = new Legend();
    this.quantile = new Slider("Strongest color at", QUANTILES,
      (value) => (value === 100 ? "largest" : `${value}%`), set("q"));
    this.least = new Slider("Show shares from", LEAST_SHARES,
      (value) => (value ? `${value}%` : "all"), set("min"));
    this.sources = new Sources(this);
    this.maps = new Maps(this);
    this.lens = new Lens();
    this.tip = element("div", { class: "tip", role: "tooltip", hidden: true });
    this.live = element("div", { class: "aloud", "aria-live": "polite" });

    this.main = element("main", {},
      element("header", { class: "top" }, element("h1", {}, visible(data.title)), this.about,
        element("div", { class: "tools" }, this.themeButton, helpButton)),
      this.exampleChoice.node,
      element("div", { class: "body" },
        element("section", { class: "ask" }, this.question, this.facts),
        element("section", { class: "controls picks" }, this.outputs.node,
          element("div", { class: "line" }, this.answers.node, this.contrast.node, this.clicks.node)),
        element("section", { class: "controls line" }, this.method.node, this.views.node,
          this.units.node, this.hiding, this.opacity.node, this.grid.node),
        element("div", { class: "work" }, this.stage,
          element("aside", { "aria-label": "Scale and largest sources" },
            element("div", {}, this.legend.node, this.quantile.node, this.least.node),
            this.sources.node),
          element("div", { class: "below" }, this.maps.node, this.lens.node))));
    this.root.append(this.main, this.tip, this.live, this.help);
  }

  #helpDialog() {
    const { settings, versions, methods } = this.data;
    const pairs = (entries) => element("dl", {}, entries.map(([term, text]) =>
      [element("dt", {}, term), element("dd", {}, text)]));
    const details = [...Object.entries(settings), ...Object.entries(versions)]
      .map(([key, text]) => [visible(key), visible(text)]);
    this.lettersToggle = element("input", { type: "checkbox", checked: true });
    const dialog = element("dialog", { "aria-label": "Keyboard and details" },
      element("h3", {}, "Keyboard"),
      pairs(KEYS.map(([keys, text]) => [element("kbd", {}, keys), text])),
      element("label", { class: "toggle" }, this.lettersToggle, "Single-letter keys"),
      element("h3", {}, "Methods"),
      pairs(methods.map(({ title, note }) => [visible(title), visible(note)])),
      details.length > 0 && [element("h3", {}, "Made with"), pairs(details)],
      element("button", { type: "button", class: "close", onclick: () => dialog.close() }, "Close"));
    return dialog;
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
    matchMedia(DARK).addEventListener("change", () => this.update(), { signal });
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
        if (isPrinting) for (const { drawn } of this.panels) drawn.print();
        this.update();
      }, { signal });
    }
  }

  #key(event) {
    const isSlider = event.target.type === "range";
    if (!this.lettersToggle.checked || hasModifier(event) || this.help.open || isSlider) return;
    const { state } = this;
    const { values, example } = state;
    const next = (key, list) => {
      this.set({ [key]: list[(list.indexOf(values[key]) + 1) % list.length] });
    };
    const quantile = (step) => {
      const place = clamp(QUANTILES.indexOf(values.q) + step, 0, QUANTILES.length - 1);
      this.set({ q: QUANTILES[place] });
    };
    const act = {
      m: () => next("m", this.data.methods.map((method) => method.name)),
      v: () => next("view", this.#offeredViews()),
      x: () => values.view !== "pair" && next("n", example.contrasts(state.pick)),
      u: () => next("u", example.unitNames),
      o: () => this.set({ own: 1 - values.own }),
      l: () => next("map", ["", ...state.mapIds]),
      e: () => next("e", this.examples.map((_, k) => k)),
      d: () => this.#flipTheme(),
      "[": () => quantile(-1),
      "]": () => quantile(1),
      "?": () => this.help.showModal(),
      Escape: () => this.point(-1),
    }[event.key];
    if (!act) return;
    act();
    event.preventDefault();
  }

  #choose(written, event) {
    const isSecond = event.shiftKey || (this.setsSecond && this.state.values.view === "pair");
    this.set(isSecond ? { view: "pair", b: written } : { t: written });
  }

  #flipTheme() {
    this.set({ theme: this.theme === "dark" ? "light" : "dark" });
  }

  #offeredViews() {
    const offered = {
      one: true, all: this.data.methods.length > 1, pair: this.state.picks.length > 1,
    };
    return Object.keys(VIEWS).filter((view) => offered[view]);
  }

  // Drawing.

  update() {
    this.#updateTheme();
    this.point(-1);
    this.view = this.#derive();
    this.#updateControls();
    this.#updatePanels();
    this.legend.update(this.view, this.colors);
    this.sources.update(this.view);
    this.maps.update(this.view);
    this.lens.update(this.view);
  }

  #updateTheme() {
    const jupyter = document.body.dataset.jpThemeLight;
    const isDark = jupyter ? jupyter === "false" : matchMedia(DARK).matches;
    this.theme = this.isPrinting ? "light" : this.state.values.theme || (isDark ? "dark" : "light");
    if (this.root.dataset.theme === this.theme) return;
    this.root.dataset.theme = this.theme;
    this.themeButton.setAttribute("aria-pressed", String(this.theme === "dark"));
    this.colors = new Colors(this.root);
  }

  // All that follows from the state: which panels there are, with which relevance and scale.
  #derive() {
    const { state } = this;
    const { example, unit, method, pick, second, values } = state;
    const hidden = { own: !values.own, last: !values.last, share: values.min / 100 };
    const panel = (method, pick, more) => ({
      method, pick, against: values.n,
      relevance: example.relevance(method, pick, values.n, unit, hidden), ...more,
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

  #updateControls() {
    this.#updateExamples();
    this.#updateQuestion();
    this.#updatePicks();
    this.#updateSettings();
  }

  #updateExamples() {
    const { example, values } = this.state;
    const size = example.isImage
      ? `${example.pixels.size[1]} × ${example.pixels.size[0]} pixels`
      : count(example.tokens.length, "token");
    const outputs = example.outputs.length;
    this.about.textContent = [
      visible(this.data.model), size, ...(outputs > 1 ? [`${outputs} outputs explained`] : []),
    ].join(" · ");

    const several = this.examples.length > 1;
    this.main.classList.toggle("listed", several);
    this.exampleChoice.node.hidden = !several;
    this.exampleChoice.show(this.examples.map((each, k) => {
      const pick = each.pick("0");
      const { text, p } = pick ? each.answer(pick) : each.outputs[0].answers[0];
      const content = [
        element("span", {}, visible(each.name)), token(text), element("small", {}, percent(p)),
      ];
      return { value: k, content };
    }), values.e);
    center(this.exampleChoice.checked);
  }

  #updatePicks() {
    const { example, values, pick, picks } = this.state;
    const isPair = values.view === "pair";
    const several = example.outputs.length > 1;
    this.outputs.node.hidden = !several;
    if (several) this.outputs.show(picks.map((each) => this.#chip(each)), String(pick.output));
    center(this.outputs.checked);

    const { answers } = example.outputs[pick.output];
    const explained = new Set(example.picks(pick.output).map((each) => each.answer));
    this.answers.node.hidden = isPair && several;
    this.answers.caption.textContent = example.isImage ? "Classes" : "Answers here";
    this.answers.show(answers.map((answer, k) =>
      this.#answerOption({ output: pick.output, answer: k }, answer, explained.has(k)),
    ), example.written(pick));
    this.answers.buttons.forEach((button, k) => {
      button.disabled = !explained.has(k);
    });

    this.clicks.node.hidden = !isPair;
    this.clicks.show(options([false, true], (isSecond) => (isSecond ? "B" : "A")), this.setsSecond);

    const contrasts = example.contrasts(pick);
    this.contrast.node.hidden = isPair || contrasts.length < 2;
    this.contrast.show(contrasts.map((against) => {
      if (against < 0) return { value: -1, content: "none", title: "The answer by itself" };
      const { text, p, rank } = answers[against];
      const title = `${name(text)}: ${percent(p)}, rank ${rank}`;
      return { value: against, content: token(text), title };
    }), values.n);
  }

  #updateSettings() {
    const { example, values } = this.state;
    this.method.show(this.data.methods.map((each) => ({
      value: each.name, content: visible(each.title), title: visible(each.note),
    })), values.m);
    const views = this.#offeredViews();
    const pair = example.outputs.length > 1 ? VIEWS.pair : "Two answers";
    this.views.node.hidden = views.length < 2;
    this.views.show(options(views, (view) => (view === "pair" ? pair : VIEWS[view])), values.view);
    this.units.node.hidden = example.unitNames.length < 2;
    this.units.show(options(example.unitNames, (unit) => UNITS[unit] ?? visible(unit)), values.u);
    this.hiding.hidden = example.isImage;
    this.own.show(!values.own);
    // Where all outputs are read at the prompt's last token, it is the own share.
    this.last.node.hidden = example.outputs.every(({ position }) => position === example.prompt - 1);
    this.last.show(!values.last);
    this.opacity.node.hidden = !example.isImage;
    this.opacity.show(values.opacity);
    this.grid.node.hidden = !example.grid;
    this.grid.show(values.grid);
    this.quantile.show(values.q);
    this.least.show(values.min);
  }

  #updateQuestion() {
    const { example, values, pick, second } = this.state;
    const first = example.answer(pick);
    const facts = ({ text, p, rank, logit }) =>
      [token(text), " ", element("b", {}, percent(p)), ` · rank ${rank} · logit ${plain(logit)}`];
    const other = values.view === "pair" ? example.answer(second)
      : values.n >= 0 ? example.outputs[pick.output].answers[values.n] : null;
    const link = values.view === "pair" ? ", and why " : ", not ";
    fill(this.question, "Why ", quoted(first.text), other && [link, quoted(other.text)], "?");
    fill(this.facts, "The model gives ", facts(first), other && ["; ", facts(other)], ".");
  }

  #chip(pick) {
    const { example, values, second } = this.state;
    const { text, p } = example.answer(pick);
    const isPair = values.view === "pair";
    const isPinned = isPair && second.output === pick.output;
    const isFirst = isPair && pick.output === this.state.pick.output;
    const mark = isPinned ? "B" : isFirst ? "A" : null;
    const likeliest = example.outputs[pick.output].answers.slice(0, 5);
    const bar = element("b");
    bar.style.width = `${100 * p}%`;
    return {
      value: String(pick.output),
      className: isPinned ? "second" : null,
      label: `${name(text)}, ${percent(p)}${isPinned ? ", pinned as B" : ""}`,
      title: likeliest.map((each) => `${name(each.text)} ${percent(each.p)}`).join("\n"),
      content: [
        token(text), element("small", {}, percent(p)), element("i", {}, bar),
        mark && element("em", {}, mark),
      ],
    };
  }

  #answerOption(pick, { text, p, rank }, isExplained) {
    const { example, values, second } = this.state;
    const value = example.written(pick);
    const isPinned = values.view === "pair" && value === example.written(second);
    return {
      value,
      className: [isExplained ? "" : "bare", isPinned ? "second" : ""].join(" "),
      title: `rank ${rank}${isExplained ? "" : ", not explained"}`,
      label: `${name(text)}, ${percent(p)}${isPinned ? ", pinned as B" : ""}`,
      content: [token(text), element("small", {}, percent(p))],
    };
  }

  #updatePanels() {
    const { values, example } = this.state;
    const kind = [values.e, values.view, values.u, values.view === "all" || values.m].join();
    const { panels } = this.view;
    if (kind !== this.kind) this.#buildPanels(kind);
    else panels.forEach((panel, k) => {
      panel.drawn = this.panels[k].drawn;
    });
    this.panels = panels;
    for (const panel of panels) {
      const title = panel.drawn.node.querySelector("header strong");
      const letter = panel.isSecond ? "B " : "A ";
      if (title) fill(title, letter, token(example.answer(panel.pick).text));
      const isChosen = values.view === "all" && panel.method === this.state.method;
      panel.drawn.node.classList.toggle("chosen", isChosen);
      panel.drawn.update(panel);
    }
  }

  #buildPanels(kind) {
    const { values, example } = this.state;
    const scrolls = this.panels.map(({ drawn }) => drawn.scroll);
    const { activeElement } = document;
    const focused = this.panels.findIndex(({ drawn }) => drawn.node.contains(activeElement));
    for (const { drawn } of this.panels) drawn.dispose();
    const isSameText = this.kind?.split(",")[0] === String(values.e);
    this.kind = kind;
    const { panels } = this.view;
    for (const panel of panels) {
      const { method } = panel;
      panel.title = {
        all: () => element("button", {
          type: "button", title: visible(method.note), onclick: () => this.set({ m: method.name }),
        }, visible(method.title)),
        pair: () => element("strong"),
        one: () => null,
      }[values.view]();
      panel.drawn = new (example.isImage ? ImagePanel : TextPanel)(this, panel);
    }
    this.stage.className = `stage ${values.view}`;
    fill(this.stage, panels.map(({ drawn }) => drawn.node));
    panels.forEach(({ drawn, pick }, k) => {
      if (isSameText) drawn.scroll = scrolls[k] ?? scrolls[0];
      else if (!example.isImage) {
        drawn.reveal(this.view.unit.of[example.outputs[pick.output].position ?? 0]);
      }
    });
    if (focused < 0) return;
    const { drawn } = panels[Math.min(focused, panels.length - 1)];
    drawn.node.querySelector("[tabindex]").focus({ preventScroll: true });
  }

  // The part that is pointed at: in every panel, in the list, in the map, and in words.
  point(part, panel = null, { aloud = false } = {}) {
    if (part === this.pointed && !aloud) return;
    const before = this.pointed;
    this.pointed = part;
    for (const { drawn } of this.panels) drawn.mark(part, before);
    this.sources.mark(part, before);
    this.maps.viewer.draw();
    const anchor = part >= 0 && panel?.anchor(part);
    this.tip.hidden = !anchor;
    if (!anchor) return;
    const readings = this.panels.map((each) => this.#reading(each, part));
    const row = (cells) => element("tr", {}, cells.map((text) => element("td", {}, text)));
    fill(this.tip, element("div", {}, this.#partName(part)),
      element("table", {}, readings.map(row)));
    this.#placeTip(anchor);
    if (!aloud) return;
    this.live.textContent = this.tip.textContent;
    const words = readings.map((cells) => cells.join(" "));
    panel.describe(part, [this.#plainName(part), ...words].join(", "));
  }

  reveal(part) {
    for (const { drawn } of this.panels) drawn.reveal(part);
    this.point(part, this.panels[0].drawn, { aloud: true });
  }

  #reading({ method, pick, relevance }, part) {
    const label = {
      one: "relevance",
      all: visible(method.title),
      pair: `for ${name(this.state.example.answer(pick).text)}`,
    }[this.state.values.view];
    if (part > relevance.read) return [label, "not read", "", ""];
    const value = signed(relevance.values[part]);
    if (relevance.hidden.has(part)) return [label, value, "hidden", ""];
    const rank = relevance.ranks.get(part);
    return [label, value, percent(relevance.share(part)), rank === undefined ? "" : `#${rank + 1}`];
  }

  #partName(part) {
    const { example, unit } = this.view;
    if (example.isImage) {
      const [, columns] = unit.shape;
      return `${unit.name}: row ${Math.floor(part / columns)}, column ${part % columns}`;
    }
    const [first, end] = unit.bounds[part];
    const place = end - first > 1 ? `tokens ${first}–${end - 1}` : `token ${first}`;
    const named = unit.names[part] ? `${visible(unit.names[part])}, ` : "";
    return [
      token(shorter(example.partText(unit, part))),
      element("span", { class: "quiet" }, ` ${named}${place}`),
    ];
  }

  #plainName(part) {
    const { example, unit } = this.view;
    return example.isImage ? this.#partName(part) : name(shorter(example.partText(unit, part)));
  }

  #placeTip(anchor) {
    const page = this.root.getBoundingClientRect();
    const { width, height } = this.tip.getBoundingClientRect();
    const middle = anchor.left + anchor.width / 2 - width / 2;
    const left = Math.max(page.left + 8, Math.min(middle, page.right - width - 8));
    const above = anchor.top - height - 8;
    const top = above > 4 ? above : anchor.bottom + 8;
    this.tip.style.left = `${left - page.left}px`;
    this.tip.style.top = `${top - page.top}px`;
  }
}

const options = (values, content) => values.map((value) => ({ value, content: content(value) }));
const shorter = (text) => (text.length > 120 ? `${text.slice(0, 119)}…` : text);

// Scroll a row so that this child is in its middle, without moving the page.
function center(node) {
  const row = node?.parentElement;
  if (!row) return;
  row.scrollLeft = node.offsetLeft - row.offsetLeft - (row.clientWidth - node.offsetWidth) / 2;
  row.scrollTop = node.offsetTop - row.offsetTop - (row.clientHeight - node.offsetHeight) / 2;
}
