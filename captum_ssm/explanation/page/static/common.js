// What the listed examples have in common: their answers, and the tokens that matter on average.
import { ofWhole, styled } from "./bars.js";
import { tally } from "./examples.js";
import { added, element, fill, tableParts, tableRow } from "./dom.js";
import { count, name, percent, signed, visible } from "./format.js";

const MOST = 12;

export class Common {
  constructor(page) {
    this.page = page;
    this.answers = element("div");
    this.tokens = element("div");
    this.node = element("section", { class: "common", "aria-label": "Summary" }, this.answers, this.tokens);
  }

  update(state) {
    const { values, listed } = state;
    this.node.hidden = !values.summary || state.examples.length < 2;
    const key = [listed, values.m, state.showsOwn, values.template].join();
    if (this.node.hidden || key === this.key) return;
    this.key = key;
    const examples = listed.map((k) => state.examples[k]);
    const { page } = this;
    const answers = tally(examples.map(({ first }) => name(first.text)));
    const most = answers[0]?.[1] ?? 1;
    const chosen = (text) => examples.filter(({ first }) => name(first.text) === text);
    fill(this.answers, element("h2", { class: "label" }, `Answers of ${count(examples.length, "example")}`),
      table(["answer", "", "examples", "mean probability"], answers.slice(0, MOST).map(([text, number]) => [
        linked(text, () => page.set({ only: values.only === text ? "" : text })),
        tallied(number / most, ""), String(number), mean(chosen(text).map(({ first }) => first.p)),
      ])));
    const entries = tokens(examples, state);
    const largest = entries[0]?.share ?? 1;
    fill(this.tokens, element("h2", { class: "label" }, `Tokens by mean share · ${visible(state.method.title)}`),
      entries.length === 0
        ? element("p", { class: "quiet" }, "No token stands in two of these examples.")
        : table(["token", "", "examples", "mean share", "mean relevance"],
          entries.map(({ text, number, share, value }) => [
            linked(text, () => page.set({ find: text })),
            tallied(share / largest, page.colors.side(value)),
            String(number), percent(share), signed(value),
          ])));
  }
}

// A token that is seen once is left out: no mean can be taken of it.
function tokens(examples, { method, values, showsOwn }) {
  const found = new Map();
  for (const example of examples.filter(({ isText }) => isText)) {
    const pick = example.pick(String(example.opening));
    if (!pick) continue;
    const hidden = { own: !showsOwn, last: false, template: !values.template, share: 0 };
    const relevance = example.relevance(method, pick, -1, example.units.token, hidden);
    const sums = new Map();
    for (const part of relevance.order) {
      const text = name(example.tokens[part]);
      const [share, value] = sums.get(text) ?? [0, 0];
      sums.set(text, [share + relevance.share(part), value + relevance.values[part]]);
    }
    for (const [text, [share, value]] of sums) {
      const entry = found.get(text) ?? { text, number: 0, share: 0, value: 0 };
      entry.number += 1;
      entry.share += share;
      entry.value += value;
      found.set(text, entry);
    }
  }
  return [...found.values()].filter(({ number }) => number > 1)
    .map((entry) => ({ ...entry, share: entry.share / entry.number, value: entry.value / entry.number }))
    .sort((a, b) => b.share - a.share).slice(0, MOST);
}

const mean = (values) => (values.some((value) => value === null) ? "·"
  : percent(added(values) / values.length));
const linked = (text, act) => element("button", { type: "button", class: "link token", onclick: act }, text);

const tallied = (share, backgroundColor) =>
  element("span", { class: "tally" }, styled("i", { width: ofWhole(share), backgroundColor }));
const table = (heads, rows) => element("table", {}, tableParts(heads, rows.map((cells) => tableRow(cells))));
