// The largest sources: each with its surroundings, value and share, and what all of it adds up to.
import { sidedBar } from "./bars.js";
import { Choice } from "./controls.js";
import { brush, element, fill } from "./dom.js";
import { percent, signed, token, visible } from "./format.js";
import { COUNTS } from "./state.js";
import { sums } from "./sums.js";

const BEFORE = 14; // letters
const AFTER = 60;

export class Sources {
  constructor(page) {
    this.page = page;
    this.label = element("h2", { class: "label", "data-word": "list" });
    this.list = element("ol", { class: "sources" });
    this.sum = element("div", { class: "sum" });
    this.rows = new Map();
    this.counts = new Choice("list", (k) => page.set({ k }), { caption: null, label: "List" });
    const heading = element("div", { class: "heading" }, this.label, this.counts.node);
    this.node = element("div", {}, heading, this.list, this.sum);
  }

  update(view) {
    const { listed, state } = view;
    this.counts.show(COUNTS.map((value) => ({ value, content: String(value) })), state.values.k);
    const size = (part) => Math.max(...listed.map(({ relevance }) => Math.abs(relevance.values[part])));
    const { k } = state.values;
    // What is hidden in the text is listed all the same: nobody should miss the largest.
    const largest = new Set(listed.flatMap(({ relevance: { order, hidden, gone } }) =>
      [...order.slice(0, k), ...hidden].filter((part) => !gone.has(part))));
    const parts = [...largest].filter(size).sort((a, b) => size(b) - size(a)).slice(0, k);
    const isShown = (part) => listed.some(({ relevance }) => relevance.has(part));
    const most = Math.max(0, ...parts.filter(isShown).map(size)) || 1;
    this.label.textContent = "Largest sources" +
      { one: "", all: ` · ${state.method.title}`, pair: " · A over B" }[state.values.view];
    this.rows = new Map(parts.map((part) => [part, this.#row(view, part, most)]));
    fill(this.list, parts.length
      ? [...this.rows.values()].map((row) => element("li", {}, row))
      : element("li", { class: "quiet" }, "None is that large."));
    fill(this.sum, sums(view).map((text) => element("p", {}, text)));
    this.#drawCrops(view);
  }

  mark(part, before) {
    this.rows.get(before)?.classList.remove("pointed");
    this.rows.get(part)?.classList.add("pointed");
  }

  #row({ example, unit, listed }, part, most) {
    const { page } = this;
    const isHidden = listed.every(({ relevance }) => relevance.hidden.has(part));
    return element("button", {
      type: "button",
      class: isHidden ? "unlisted" : null,
      onclick: () => page.reveal(part),
      onpointerenter: ({ pointerType }) => pointerType === "touch" || page.point(part),
      onpointerleave: ({ pointerType }) => pointerType === "touch" || page.point(-1),
    }, example.isText ? surroundings(page.state, part) : place(example, unit, part),
    listed.map(({ relevance }, k) => {
      const isRead = relevance.has(part) || relevance.hidden.has(part);
      const value = isRead ? relevance.values[part] : 0;
      const share = relevance.has(part) ? percent(relevance.share(part)) : isRead ? "hidden" : "·";
      return element("span", { class: "numbers" },
        element("span", { class: "quiet" }, k || !example.isText ? "" : String(unit.bounds[part][0])),
        sidedBar(value / most, page.colors),
        element("span", {}, isRead ? signed(value) : "·"),
        element("span", {}, share));
    }));
  }

  // Where the part lies on the picture: a cut-out of it.
  #drawCrops({ panels }) {
    const { drawn } = panels[0];
    for (const [part, row] of this.rows) {
      const canvas = row.querySelector("canvas");
      const cut = canvas && drawn.crop(part);
      if (!cut) continue;
      const { context, width, height } = brush(canvas);
      context.imageSmoothingEnabled = cut.source[2] > 2 * width;
      context.drawImage(cut.picture, ...cut.source, 0, 0, width, height);
    }
  }
}

// The part in the text around it, from one whole word to another.
function surroundings({ example, unit, values }, part) {
  const [first, end] = unit.bounds[part];
  const picture = example.pictureOf(unit, part);
  if (picture) {
    const name = example.partText(unit, part);
    return element("span", { class: "what place" },
      picture.pixels && picture.isGrid && element("canvas", { class: "crop" }), element("span", {}, visible(name)));
  }
  const isShown = (token) => values.template || !example.isTemplate(token);
  const near = (from, to) =>
    visible(example.text(Math.max(0, from), to, isShown).replace(/\s+/g, " "));
  if (unit.names[part]) {
    return element("span", { class: "what" }, token(unit.names[part]),
      element("bdi", { class: "after" }, ` ${near(first, end).trim()}`.slice(0, AFTER)));
  }
  const text = example.partText(unit, part);
  const called = token(text);
  if (example.readAs(unit, part)) called.classList.add("unknown");
  const all = near(first - BEFORE, first) + (/^\s/.test(text) ? " " : "");
  const before = all.length <= BEFORE ? all : all.slice(-BEFORE).replace(/^\S*(?=\s)/, "");
  return element("span", { class: "what" },
    element("bdi", { class: "before" }, element("bdi", {}, before)),
    called,
    element("bdi", { class: "after" }, near(end, end + AFTER).slice(0, AFTER)));
}

// A long name is cut before the step or the value.
function place(example, unit, part) {
  const [, name, end] = /^(.*?)((?:, step \d+| = [^=]*)?)$/s.exec(example.placeName(unit, part));
  return element("span", { class: "what place" },
    example.isImage && element("canvas", { class: "crop" }),
    element("span", {}, name), end && element("span", { class: "end" }, end));
}
