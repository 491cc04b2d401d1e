// What is known of one part, in the tooltip and for those who listen.
import { element, range, tableRow } from "./dom.js";
import { name, percent, plain, signed, token, visible } from "./format.js";

const LONGEST = 120;

export class Reading {
  constructor(page) {
    this.page = page;
  }

  content(part) {
    const rows = this.#rows(part).map((cells) => tableRow(cells));
    const notes = this.#notes(part).map((text) => element("div", { class: "quiet" }, text));
    return [element("div", {}, this.#name(part)), element("table", {}, rows), notes];
  }

  words(part) {
    const { example, unit } = this.page.view;
    const called = example.isText ? name(shorter(example.partText(unit, part))) : this.#name(part);
    return [called, ...this.#rows(part).map((cells) => cells.join(" "))].join(", ");
  }

  #rows(part) {
    return this.page.panels.panels.map((panel) => this.#row(panel, part));
  }

  #row({ method, pick, relevance }, part) {
    const { state } = this.page;
    const label = {
      one: "relevance",
      all: visible(method.title),
      pair: `for ${name(state.example.answer(pick).text)}`,
    }[state.values.view];
    if (part > relevance.read) return [label, "not read", "", ""];
    const value = signed(relevance.values[part]);
    if (relevance.hidden.has(part)) return [label, value, "hidden", ""];
    const rank = relevance.ranks.get(part);
    return [label, value, percent(relevance.share(part)), rank === undefined ? "" : `#${rank + 1}`];
  }

  // What the marks of this part mean, where it has some.
  #notes(part) {
    const { example, unit, panels: [{ relevance }] } = this.page.view;
    if (example.isSeries && !example.isTable && unit.name === "value") {
      return [`The value there is ${plain(example.valueAt(part))}.`];
    }
    if (!example.isText) return [];
    const [first, end] = unit.bounds[part];
    const readAs = example.readAs(unit, part);
    const isOutput = range(end - first).some((k) => example.outputAt.has(first + k));
    return [
      relevance.hidden.has(part) && part === relevance.own
        && "Hatched: the answer is read here, and the token reads itself.",
      !relevance.hidden.has(part) && part === relevance.own && !example.isLabeled
        && "Solid line: the answer is read here.",
      relevance.hidden.has(part) && part !== relevance.own && "Hatched: hidden by choice.",
      readAs && `Wavy: the tokenizer does not know this word, so the model read ${visible(readAs)} in its place.`,
      part > relevance.read && "Comes after the token where the answer is read.",
      isOutput && "Dotted: an explained output. Click to explain it.",
    ].filter(Boolean);
  }

  #name(part) {
    const { example, unit } = this.page.view;
    if (!example.isText) return example.isImage
      ? `${unit.name}: ${example.placeName(unit, part)}` : example.placeName(unit, part);
    const [first, end] = unit.bounds[part];
    const numbers = end - first > 1 ? `tokens ${first}–${end - 1}` : `token ${first}`;
    const called = unit.names[part] || example.turnOf(unit, part);
    const named = called ? `${visible(called)}, ` : "";
    return [
      token(shorter(example.partText(unit, part))),
      element("span", { class: "quiet" }, ` ${named}${numbers}`),
    ];
  }
}

const shorter = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text);
