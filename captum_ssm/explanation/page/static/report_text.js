// One example as a line or two of its text, colored by relevance; it opens as its own page.
import { Example, limit } from "./data.js";
import { element, fill } from "./dom.js";
import { cut, percent, quoted, visible } from "./format.js";

const MINI_TOKENS = 60; // tokens that are drawn, those around the strongest one

export class ShownTexts {
  constructor(data, rows, method) {
    this.data = data;
    this.at = new Map(rows.map((row, k) => [row, k]));
    this.method = data?.methods.find(({ title }) => title === method) ?? data?.methods[0];
    this.examples = new Map();
  }

  has(row) {
    return this.at.has(row);
  }

  // The data of a page with this example alone.
  alone(row) {
    return { ...this.data, examples: [this.data.examples[this.at.get(row)]] };
  }

  async #example(row) {
    if (!this.examples.has(row)) {
      this.examples.set(row, await Example.unpack(this.data.examples[this.at.get(row)]));
    }
    return this.examples.get(row);
  }

  // Its text in colors; it is filled in as soon as its numbers are unpacked.
  draw(row, colors) {
    const node = element("p", { class: "mini" });
    this.#example(row).then((example) => fill(node, this.#parts(example, colors)));
    return node;
  }

  #parts(example, colors) {
    const pick = example.pick(String(example.opening));
    const hidden = { own: !example.opensWithOwn, last: false, template: false, share: 0 };
    const relevance = example.relevance(this.method, pick, -1, example.units.token, hidden);
    const strongest = relevance.order[0] ?? 0;
    const end = Math.min(Math.max(relevance.read + 1, 1), Math.max(MINI_TOKENS, strongest + MINI_TOKENS / 2));
    const first = Math.max(0, end - MINI_TOKENS);
    const scale = limit([relevance], 99.5);
    const parts = example.tokens.slice(first, end).map((text, k) => {
      const { before, body } = cut(text);
      const swatch = relevance.has(first + k) ? colors.of(relevance.values[first + k], scale) : null;
      const node = element("span", { class: ["part", !before && "joined", first + k === relevance.own && "reads"].filter(Boolean).join(" ") }, body);
      if (swatch) Object.assign(node.style, { backgroundColor: swatch.css, color: swatch.text });
      return [before, node, !text.trim() && element("wbr")]; // a line may end at a space that is a token
    });
    return [first > 0 && "… ", parts, end <= relevance.read && " …"];
  }
}

// A card: what is asked, its text, and a way to its page.
export function exampleCard(line, texts, colors, open, other = null) {
  const wrong = line.right === false ? [", the model says ", quoted(line.prediction)] : [];
  return element("li", { class: "card" },
    element("div", { class: "asked" }, element("span", {}, quoted(line.target), wrong),
      element("small", { class: "quiet" }, [
        line.p === null ? "" : percent(line.p),
        line.moved === null ? "" : `${percent(line.moved)} moved`,
      ].filter(Boolean).join(" · ")),
      element("button", { type: "button", class: "action", "aria-label": `Open example ${line.index}: ${visible(line.text)}`,
        onclick: () => open(line.index) }, `Open ${line.index}`)),
    texts.has(line.index) ? texts.draw(line.index, colors) : element("p", { class: "mini" }, visible(line.text)),
    Boolean(other?.has(line.index)) && [element("small", { class: "quiet" }, "and in the other run"), other.draw(line.index, colors)]);
}
