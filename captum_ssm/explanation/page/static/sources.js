// The largest sources: each with its surroundings, value and share, and what all of it adds up to.
import { Choice } from "./controls.js";
import { brush, element, fill } from "./dom.js";
import { count, name, percent, plain, signed, token, visible } from "./format.js";
import { COUNTS } from "./state.js";

const AROUND = 4;

export class Sources {
  constructor(page) {
    this.page = page;
    this.label = element("h2", { class: "label" });
    this.list = element("ol", { class: "sources" });
    this.sum = element("p", { class: "sum" });
    this.rows = new Map();
    this.counts = new Choice("List", (k) => page.set({ k }), { caption: null });
    const heading = element("div", { class: "heading" }, this.label, this.counts.node);
    this.node = element("div", {}, heading, this.list, this.sum);
  }

  update(view) {
    const { listed, state } = view;
    this.counts.show(COUNTS.map((value) => ({ value, content: String(value) })), state.values.k);
    const weight = (part) => Math.max(...listed.map(({ relevance }) =>
      relevance.has(part) ? Math.abs(relevance.values[part]) : 0));
    const { k } = state.values;
    const largest = new Set(listed.flatMap(({ relevance }) => relevance.order.slice(0, k)));
    const parts = [...largest].sort((a, b) => weight(b) - weight(a)).slice(0, k);
    const most = weight(parts[0]) || 1;
    this.label.textContent = "Largest sources" +
      { one: "", all: ` · ${state.method.title}`, pair: " · A over B" }[state.values.view];
    this.rows = new Map(parts.map((part) => [part, this.#row(view, part, most)]));
    fill(this.list, parts.length
      ? [...this.rows.values()].map((row) => element("li", {}, row))
      : element("li", { class: "quiet" }, "None is that large."));
    fill(this.sum, summary(view));
    if (view.example.isImage) this.#drawCrops(view);
  }

  mark(part, before) {
    this.rows.get(before)?.classList.remove("pointed");
    this.rows.get(part)?.classList.add("pointed");
  }

  #row({ example, unit, listed }, part, most) {
    const { page } = this;
    return element("button", {
      type: "button",
      onclick: () => page.reveal(part),
      onpointerenter: () => page.point(part),
      onpointerleave: () => page.point(-1),
    }, example.isImage ? crop(unit, part) : surroundings(example, unit, part),
    listed.map(({ relevance }, k) => {
      const isShown = relevance.has(part);
      const value = isShown ? relevance.values[part] : 0;
      const place = k || example.isImage ? "" : String(unit.bounds[part][0]);
      return [
        element("span", { class: "number quiet" }, place),
        bar(value / most, page.colors),
        element("span", { class: "number" }, isShown ? signed(value) : "·"),
        element("span", { class: "number" }, isShown ? percent(relevance.share(part)) : "·"),
      ];
    }));
  }

  // Where the part lies on the picture: a cut-out of it.
  #drawCrops({ unit, panels }) {
    const { picture } = panels[0].drawn;
    const [rows, columns] = unit.shape;
    for (const [part, row] of this.rows) {
      const { context, width, height } = brush(row.querySelector("canvas"));
      const [x, y] = [part % columns, Math.floor(part / columns)];
      const [across, down] = [picture.width / columns, picture.height / rows];
      context.imageSmoothingEnabled = across > 2 * width;
      context.drawImage(picture, x * across, y * down, across, down, 0, 0, width, height);
    }
  }
}

function surroundings(example, unit, part) {
  const [first, end] = unit.bounds[part];
  const near = (from, to) => visible(example.text(Math.max(0, from), to).replace(/\s+/g, " "));
  if (unit.names[part]) return element("span", { class: "what" }, token(unit.names[part]));
  const text = example.partText(unit, part);
  const before = near(first - AROUND, first) + (/^\s/.test(text) ? " " : "");
  return element("span", { class: "what" },
    element("bdi", { class: "before" }, element("bdi", {}, before)),
    token(text),
    element("bdi", { class: "after" }, near(end, end + AROUND)));
}

function crop(unit, part) {
  const [, columns] = unit.shape;
  return element("span", { class: "what" }, element("canvas", { class: "crop" }),
    element("span", {}, `row ${Math.floor(part / columns)}, column ${part % columns}`));
}

function bar(share, colors) {
  const mark = element("i");
  mark.style.backgroundColor = colors.of(Math.sign(share), 1.4).css;
  mark.style.width = `${50 * Math.abs(share)}%`;
  mark.style[share < 0 ? "right" : "left"] = "50%";
  return element("span", { class: "bar" }, mark);
}

function summary({ example, unit, listed, state }) {
  const { method } = state;
  const [{ relevance, pick, against }] = listed;
  if (relevance.isMissing) return [`The explanation has no relevance by ${method.title} for this.`];
  const texts = [`Share: of the ${count(relevance.shown, unit.name)} read`];
  if (relevance.hidden.has(relevance.own)) {
    const own = name(example.partText(unit, relevance.own));
    const value = signed(relevance.values[relevance.own]);
    texts.push(`, without “${own}”, where the prediction is made (${value})`);
  }
  texts.push(". ");
  if (method.adds_up) {
    const { answers } = example.outputs[pick.output];
    const logit = answers[pick.answer].logit - (against < 0 ? 0 : answers[against].logit);
    texts.push(`All relevance adds up to ${signed(relevance.sum)}; `);
    if (relevance.score !== null) texts.push(`the explained score is ${signed(relevance.score)}.`);
    else texts.push(`the ${against < 0 ? "logit is" : "logits differ by"} ${plain(logit)}.`);
  } else {
    texts.push(`${visible(method.title)} does not add up to the logit`);
    const isDifference = against >= 0 && !relevance.isDirect;
    texts.push(isDifference ? ", and its difference explains no difference of logits." : ".");
  }
  return texts;
}
