// A report: what many explained examples have in common, and how they differ.
import { Colors } from "./colors.js";
import { Choice } from "./controls.js";
import { element, fill, hasModifier, tableParts } from "./dom.js";
import { count, percent, visible } from "./format.js";
import { hostIsDark, themeButton, watchHost, writeAddress } from "./host.js";
import { openPage } from "./page.js";
import { differenceBars, orderedColumns, shareBars } from "./report_bars.js";
import { Cloud, pointTold } from "./report_cloud.js";
import { LineList } from "./report_list.js";
import { corpusSentence, reportFacts, slicedBy, sliceRow } from "./report_parts.js";
import { exampleCard, ShownTexts } from "./report_text.js";
import { Tip } from "./tip.js";

const KIND_NAMES = { word: "Words", token: "Tokens", part: "Named parts", layer: "Layers" };
const PLACE_NAMES = { tenth: "In tenths", start: "From the start", end: "From the end", distance: "To the answer" };
const FEW_KEYS = 14;

export function openReport(parent, data) {
  const report = new ReportPage(data);
  parent.append(report.root);
  report.start();
}

class ReportPage {
  constructor(data) {
    this.data = data;
    const { listed } = data;
    this.lines = listed.index.map((_, k) => Object.fromEntries(Object.entries(listed).map(([key, values]) => [key, values[k]])));
    this.byRow = new Map(this.lines.map((line) => [line.index, line]));
    this.texts = new ShownTexts(data.shown, data.rows, data.method);
    this.other = new ShownTexts(data.other, data.otherRows, data.method);
    this.hasRight = data.right !== null;
    this.hasChange = data.change !== null;
    this.hasGroups = data.slices.some(({ by }) => by === "group");
    this.stopped = new AbortController();
    this.root = element("div", { class: "captum-page whole report", lang: "en" });
    this.#build();
    this.read();
  }

  start() {
    this.tip = new Tip(this.root, this.stopped.signal);
    this.root.append(this.tip.node);
    watchHost(() => this.update(), this.stopped.signal);
    addEventListener("hashchange", () => { this.read(); this.update(); });
    document.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.colors && !this.main.hidden && this.cloud.draw(this.isIn, this.colors)).observe(this.main);
    this.update();
  }

  get defaults() {
    return { slice: "", by: this.data.slices[0]?.by ?? "", kind: this.data.shares.part ? "part" : this.data.units, place: "tenth",
      find: "", sort: "index", x: "", theme: "" };
  }

  // The state is in the address, so that it can be sent, and that Back closes an example.
  read() {
    const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    this.values = { ...this.defaults };
    for (const [key, value] of Object.entries(given)) if (key in this.values) this.values[key] = value;
    const { values, data } = this;
    if (!Object.hasOwn(data.slices, values.slice)) values.slice = "";
    if (values.slice !== "") values.by = data.slices[values.slice].by;
    if (!data.slices.some(({ by }) => by === values.by)) values.by = this.defaults.by;
    if (!Object.hasOwn(data.shares, values.kind)) values.kind = data.units;
    if (!data.shares[values.place] || !Object.hasOwn(PLACE_NAMES, values.place)) values.place = "tenth";
    if (!this.list.sort.querySelector(`option[value="${CSS.escape(values.sort)}"]`)) values.sort = "index";
    if (values.x !== "" && !this.texts.has(Number(values.x))) values.x = "";
  }

  set(change, { isStep = false } = {}) {
    Object.assign(this.values, change);
    const { defaults } = this;
    const changed = Object.entries(this.values).filter(([key, value]) => value !== defaults[key]);
    writeAddress(changed, isStep ? "pushState" : "replaceState");
    this.update();
  }

  open(row) {
    this.set({ x: String(row) }, { isStep: true });
  }

  get slice() {
    return this.data.slices[this.values.slice] ?? null;
  }

  // Whether an example lies in the chosen slice.
  isIn = (line) => {
    const { slice } = this;
    if (!slice) return true;
    return this.#valueOf(line, slice) === slice.name;
  };

  #valueOf(line, { by, name }) {
    if (by === "group") return line.group;
    if (by === "prediction") return line.right === null ? null : line.right ? "right" : "wrong";
    const value = by === "target" ? line.target : String(line[`column ${by}`]);
    const others = this.data.slices.filter((part) => part.by === by).map((part) => part.name);
    if (name.includes(" to ") && !others.includes(value)) {
      const [low, high] = name.split(" to ").map(Number);
      return Number(value) >= low && Number(value) <= high ? name : null;
    }
    return others.includes(value) ? value : "all others";
  }

  #build() {
    const { data } = this;
    const set = (key) => (value) => this.set({ [key]: value });
    this.themeButton = themeButton({ "data-tip": "Dark or light (d)" }, () => this.#flipTheme());
    this.sentence = element("h2", { class: "question" });
    this.facts = element("p", { class: "quiet" });
    this.kinds = new Choice("units", set("kind"), { caption: null, label: "What carries relevance" });
    this.places = new Choice("units", set("place"), { caption: null, label: "Where relevance lies" });
    this.bars = element("div");
    this.columns = element("div");
    this.by = new Choice("view", (by) => this.set({ by, slice: "" }), { caption: null, label: "Slices" });
    this.slices = element("div");
    this.apart = element("div");
    this.cards = element("div", { class: "cards-all" });
    this.change = element("section", { class: "change" });
    this.cloud = new Cloud(this.lines, (line, event) => this.#point(line, event), (line) => this.texts.has(line.index) && this.open(line.index));
    this.list = new LineList(this);
    this.notes = element("div", { class: "quiet" }, data.notes.map((note) => element("p", {}, visible(note))),
      data.errors.map(([row, error]) => element("p", {}, `Row ${row} could not be explained: ${visible(error)}`)));
    this.main = element("main", {},
      element("header", { class: "top" }, element("h1", {}, visible(data.title)),
        element("span", { class: "quiet" }, `${visible(data.model)} · ${visible(data.method)}`),
        element("div", { class: "tools" }, this.themeButton)),
      element("section", { class: "ask" }, this.sentence, this.facts),
      element("div", { class: "two" },
        element("section", {}, element("h2", {}, "What carries relevance"), element("div", { class: "line" }, this.kinds.node), this.bars),
        element("section", {}, element("h2", {}, "Where it lies"), element("div", { class: "line" }, this.places.node), this.columns,
          element("h2", { class: "second-heading", "data-tip": "Examples that rest on the same words and places lie close together. A cross is a wrong prediction." }, "Examples by where they look"),
          this.cloud.canvas)),
      this.change,
      data.slices.length > 0 && element("section", {}, element("h2", {}, "Slices"), element("div", { class: "line" }, this.by.node),
        element("div", { class: "two" }, this.slices, this.apart)),
      this.cards, this.list.node, this.notes);
    this.holder = element("div", { class: "holder", hidden: true });
    this.root.append(this.main, this.holder);
  }

  #flipTheme() {
    const isDark = this.root.dataset.theme === "dark";
    this.set({ theme: isDark ? "light" : "dark" });
  }

  #key(event) {
    if (hasModifier(event)) return;
    if (event.key === "Escape" && this.values.x !== "") this.close();
    if (this.values.x !== "" || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
    if (event.key === "d") this.#flipTheme();
    else if (event.key === "/") this.list.find.focus();
    else if (event.key === "Escape" && this.values.slice) this.set({ slice: "" });
    else return;
    event.preventDefault();
  }

  close() {
    const row = this.values.x;
    this.set({ x: "" });
    this.root.querySelector(`[aria-label^="Open example ${row}"]`)?.focus();
  }

  #point(line, event) {
    if (!line) {
      this.tip.hide();
      return;
    }
    const { clientX: left, clientY: top } = event;
    this.tip.show({ left, top, right: left, bottom: top, width: 0 }, pointTold(line));
  }

  // Drawing.

  update() {
    const { values } = this;
    const { documentElement } = document;
    if (values.theme && documentElement.getAttribute("theme") !== values.theme) {
      documentElement.setAttribute("theme", values.theme); // which the page of an example follows
    }
    const theme = values.theme || (hostIsDark() ? "dark" : "light");
    if (this.root.dataset.theme !== theme) {
      this.root.dataset.theme = theme;
      this.colors = new Colors(this.root);
    }
    this.themeButton.setAttribute("aria-pressed", String(theme === "dark"));
    const isOpen = values.x !== "";
    if (this.shown !== values.x) this.#show(values.x);
    this.main.hidden = isOpen;
    this.holder.hidden = !isOpen;
    if (!isOpen) this.#draw();
  }

  async #show(row) {
    this.shown = row;
    this.disposed?.();
    this.disposed = null;
    fill(this.holder);
    if (row === "") return;
    const back = element("button", { type: "button", class: "action back", onclick: () => this.close() }, "← All examples");
    const holding = [this.texts, this.other].filter((texts) => texts.has(Number(row)));
    const holders = holding.map(() => element("div"));
    fill(this.holder, element("nav", { "aria-label": "Report" }, back), holders);
    scrollTo(0, 0);
    const ends = await Promise.all(holding.map((texts, k) => openPage(holders[k], texts.alone(Number(row)), { whole: false })));
    this.disposed = () => ends.forEach((end) => end());
    back.focus();
  }

  #draw() {
    const { data, values, slice, colors } = this;
    const shares = slice?.shares ?? data.shares;
    fill(this.sentence, slice && element("span", { class: "quiet" }, `${visible(slice.name)}: `), corpusSentence(shares, data.units));
    this.facts.textContent = slice ? `${count(slice.count, "example")} of ${data.count.toLocaleString("en")}`
      + `${slice.right === null ? "" : ` · ${percent(slice.right)} predicted right`}` : reportFacts(data);
    const kinds = Object.keys(KIND_NAMES).filter((kind) => data.shares[kind]);
    this.kinds.show(kinds.map((value) => ({ value, content: KIND_NAMES[value] })), values.kind);
    const find = (key) => this.set({ find: key });
    fill(this.bars, shareBars((shares[values.kind] ?? []).slice(0, FEW_KEYS), colors, find),
      element("p", { class: "quiet" }, "Mean share of the relevance of a text, with its 95% interval over examples, sorted by the interval’s lower end; "
        + "orange where it mostly supports the answer, blue where it opposes it. At the right, in how many examples."));
    const places = Object.keys(PLACE_NAMES).filter((place) => data.shares[place]);
    this.places.show(places.map((value) => ({ value, content: PLACE_NAMES[value] })), values.place);
    fill(this.columns, orderedColumns(values.place, shares[values.place] ?? [], slice && data.shares[values.place], colors));
    this.#drawSlices();
    this.#drawChange(find);
    this.#drawCards();
    this.cloud.draw(this.isIn, colors);
    this.list.update();
  }

  #drawSlices() {
    const { data, values, slice } = this;
    const kinds = [...new Set(data.slices.map(({ by }) => by))];
    if (!kinds.length) return;
    this.by.show(kinds.map((value) => ({ value, content: slicedBy(value) })), values.by);
    const rows = data.slices.map((part, k) => [part, String(k)]).filter(([part]) => part.by === values.by);
    const heads = ["", "examples", this.hasRight && "right", "start to end", "gives more to"].filter((head) => head !== false);
    fill(this.slices, element("table", { class: "slices" },
      tableParts(heads, rows.map(([part, k]) => sliceRow(part, data.shares, values.slice === k, { hasRight: this.hasRight,
        choose: () => this.set({ slice: values.slice === k ? "" : k }) })))));
    fill(this.apart, slice
      ? [element("h3", {}, `What sets ${visible(slice.name)} apart`),
        slice.apart.length ? differenceBars(slice.apart, ["here", "in the others"], (key) => this.set({ find: key }))
          : element("p", { class: "quiet" }, "Nothing that the intervals can tell."),
        element("p", { class: "quiet" }, "Part of all relevance: a filled dot in this slice, a ring in the other examples.")]
      : element("p", { class: "quiet" }, "Choose a slice: all pictures, examples and the list are then about it alone."));
  }

  #drawChange(find) {
    const { change } = this.data;
    this.change.hidden = !change;
    if (!change) return;
    const [mean, low, high] = change.moved;
    fill(this.change, element("h2", {}, `Against ${visible(change.other)}`),
      element("p", {}, `${percent(mean)} of the relevance of a text lies elsewhere there (${percent(low)} to ${percent(high)}); `
        + `${count(change.flipped, "prediction")} differ${change.flipped === 1 ? "s" : ""}${change.unpaired ? `; ${count(change.unpaired, "example")} had no partner` : ""}.`),
      element("div", { class: "two" },
        element("div", {}, element("h3", {}, "Shares that moved most"), ...(change.shares.length
          ? [differenceBars(change.shares.slice(0, 10), ["there", "here"], find),
            element("p", { class: "quiet" }, `Part of all relevance: a filled dot by ${visible(change.other)}, a ring here.`)]
          : [element("p", { class: "quiet" }, "None beyond chance.")])),
        element("div", {}, element("h3", {}, "Examples that changed most"), this.#cardsOf(
          [...this.lines].filter((line) => line.moved !== null && this.texts.has(line.index)).sort((a, b) => b.moved - a.moved).slice(0, 3).map(({ index }) => index), this.other))));
  }

  #cardsOf(rows, other = null) {
    return element("ul", { class: "cards" }, rows.map((row) => this.byRow.get(row)).filter(Boolean)
      .map((line) => exampleCard(line, this.texts, this.colors, (at) => this.open(at), other)));
  }

  #drawCards() {
    const lines = this.lines.filter((line) => this.isIn(line) && this.texts.has(line.index));
    const sorted = [...lines].sort((a, b) => a.distance - b.distance);
    const [typical, untypical] = this.slice ? [this.slice.typical, this.slice.untypical]
      : [sorted.slice(0, 4), sorted.slice(-4).reverse()].map((some) => some.map(({ index }) => index));
    const wrong = lines.filter(({ right }) => right === false).sort((a, b) => a.p - b.p).slice(0, 4).map(({ index }) => index);
    const shown = [["Most typical", typical], ["Least typical", untypical], ["Wrong", wrong]].filter(([, rows]) => rows.length);
    fill(this.cards, shown.map(([title, rows]) => element("section", {}, element("h2", {}, title),
      this.#cardsOf(rows.filter((row) => this.texts.has(row)).slice(0, 4)))));
  }
}
