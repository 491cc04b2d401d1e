// Running text with relevance as its background. Far from what is seen, a block is plain text,
// which the browser lays out, finds and prints; near it, every part is an element with its color.
import { brush, clamp, element, fill, hasModifier, range, taken } from "./dom.js";
import { cut, digits, percent } from "./format.js";
import { Inset } from "./inset.js";
import { Turns } from "./turns.js";

const BLOCK = 128;
const NOTHING = { before: "", body: "", after: "" };
let panels = 0;

export class TextPanel {
  constructor(page, panel) {
    this.page = page;
    this.id = `captum-${panels++}`;
    this.unit = page.view.unit;
    this.example = page.view.example;
    const { gone } = panel.relevance;
    this.shapes = range(this.unit.count).map((part) =>
      (gone.has(part) ? NOTHING : cut(this.example.partText(this.unit, part))));
    this.turns = new Turns(page, this.unit);
    this.box = element("div", {
      class: "text",
      role: "listbox",
      tabindex: 0,
      "aria-label": `Text, ${panel.method.title}: arrow keys move, N goes to the next largest`,
      onpointermove: (event) => page.point(partOf(event), this),
      onpointerleave: ({ pointerType }) => pointerType === "touch" || page.point(-1),
      onkeydown: (event) => this.#key(event),
      onscroll: () => this.#moveWindow(),
      onclick: (event) => this.#press(event),
      onblur: () => page.point(-1),
    });
    this.lines = element("canvas");
    this.window = element("i");
    this.overview = element("div", {
      class: "overview",
      "aria-hidden": "true",
      onpointerdown: (event) => this.#jump(event),
      onpointermove: (event) => event.buttons && this.#jump(event),
    }, this.lines, this.window);
    this.note = element("span", { class: "quiet" });
    this.node = element("section", { class: "panel" },
      panel.title && element("header", {}, panel.title, this.note),
      element("div", { class: "flow" }, this.box, this.overview));
    this.regions = this.#regions();
    this.blocks = this.regions.flatMap(({ blocks }) => blocks);
    this.blockOf = this.blocks.flatMap((block) => Array(block.end - block.first).fill(block));
    this.insets = this.blocks.flatMap(({ inset }) => inset ?? []);
    this.observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const block = this.blocks.find(({ node }) => node === target);
        this.#fill(block, isIntersecting || page.isPrinting);
      }
    }, { root: this.box, rootMargin: "400px" });
    for (const block of this.blocks) {
      if (block.isPicture) continue;
      this.#fill(block, false);
      this.observer.observe(block.node);
    }
    this.answer = element("span", { class: "part first beyond", "aria-hidden": "true" });
    this.box.append(...this.regions.flatMap(({ node, blocks }) => node ?? blocks.map((block) => block.node)), this.answer);
  }

  update(panel) {
    this.panel = panel;
    for (const block of this.blocks) if (block.isFull && !block.isPicture) this.#color(block);
    for (const inset of this.insets) inset.update(panel);
    const { relevance, limit } = panel;
    const { hidden: hides, gone, own } = relevance;
    this.turns.update(relevance);
    const hidden = hides.has(own) && !gone.has(own)
      ? `reading token hidden, ${percent(relevance.ownShare)} · ` : "";
    this.note.textContent = `${hidden}scale ±${digits(limit)}`;
    this.#showAnswer();
    this.#drawOverview();
  }

  dispose() {
    this.observer.disconnect();
  }

  // The text in blocks; of a whole answer, the prompt, the reasoning and the answer by themselves.
  #regions() {
    const { unit, example: { whole } } = this;
    const regions = whole?.regions.map(({ name, first, end }) => [unit.of[first], unit.of[end - 1] + 1, name]);
    return (regions ?? [[0, unit.count]]).map(([first, end, name]) => {
      const blocks = this.#stretches(first, end).flatMap(([from, to, picture]) => (picture
        ? this.#pictured(from, to, picture)
        : range(Math.ceil((to - from) / BLOCK)).map((k) => ({ node: element("span"), isFull: null,
          first: from + k * BLOCK, end: Math.min(from + (k + 1) * BLOCK, to) }))));
      return { blocks, node: name && element("div", { class: `region ${name}` }, blocks.map(({ node }) => node)) };
    });
  }

  // Neighboring parts of the text, or of one picture.
  #stretches(first, end) {
    const found = [];
    for (let part = first; part < end; part += 1) {
      const picture = this.example.pictureOf(this.unit, part);
      const last = found.at(-1);
      if (last && last[2] === picture) last[1] = part + 1;
      else found.push([part, part + 1, picture]);
    }
    return found;
  }

  // A picture is drawn where the first of its tokens stands.
  #pictured(first, end, picture) {
    this.drawn ??= new Map();
    const isFirst = !this.drawn.has(picture);
    if (isFirst) this.drawn.set(picture, new Inset(this.page, picture, this.unit));
    const inset = this.drawn.get(picture);
    // What follows begins a line, without the space before it.
    if (this.shapes[end]?.before) this.shapes[end] = { ...this.shapes[end], before: "" };
    return [{ node: isFirst ? inset.node : element("span"), inset: isFirst ? inset : null, isPicture: true, isFull: true,
      parts: [], first, end }];
  }

  #insetOf(part) {
    return part >= 0 && this.drawn?.get(this.example.pictureOf(this.unit, part));
  }

  // All of it as elements with colors, as print needs it.
  print() {
    for (const block of this.blocks) this.#fill(block, true);
  }

  crop(part) {
    return this.#insetOf(part)?.crop(part);
  }

  element(part) {
    const block = this.blockOf[part];
    return block?.isFull ? block.parts[part - block.first] ?? null : null;
  }

  // What is hidden altogether is nowhere.
  anchor(part) {
    const inset = this.#insetOf(part);
    if (inset) return inset.anchor(part);
    const node = this.element(part);
    return node?.getClientRects().length ? node.getBoundingClientRect() : null;
  }

  mark(part, before) {
    this.element(before)?.classList.remove("pointed");
    const node = this.element(part);
    node?.classList.add("pointed");
    for (const inset of new Set([before, part].map((one) => this.#insetOf(one)))) if (inset) inset.draw();
    if (node) this.box.setAttribute("aria-activedescendant", node.id);
    else this.box.removeAttribute("aria-activedescendant");
  }

  describe(part, text) {
    this.element(part)?.setAttribute("aria-label", text);
  }

  reveal(part) {
    this.#fill(this.blockOf[part], true);
    const box = this.box.getBoundingClientRect();
    const anchor = this.anchor(part);
    if (!anchor) return;
    if (anchor.top < box.top + 16 || anchor.bottom > box.bottom - 16) {
      this.box.scrollTop += anchor.top - box.top - box.height / 2;
    }
  }

  get scroll() {
    return this.box.scrollTop;
  }

  set scroll(top) {
    this.box.scrollTop = top;
  }

  // A turn begins a line, so the space before its first part is left out.
  #fill(block, isFull) {
    if (block.isPicture || block.isFull === isFull) return;
    block.isFull = isFull;
    const { first, end } = block;
    const shapes = this.shapes.slice(first, end);
    if (!isFull) {
      block.parts = [];
      fill(block.node, shapes.map(({ before, body, after }, k) =>
        [this.turns.label(first + k) ?? before, body + after]));
      block.node.normalize();
      return;
    }
    block.parts = shapes.map(({ body }, k) => {
      const id = `${this.id}-${first + k}`;
      const node = element("span", { class: "part", role: "option", id }, body);
      node.index = first + k;
      return node;
    });
    fill(block.node, shapes.map(({ before, after }, k) =>
      [this.turns.label(first + k) ?? before, block.parts[k], after]));
    if (this.panel) this.#color(block);
  }

  #color(block) {
    const { relevance, limit } = this.panel;
    for (const node of block.parts) {
      const part = node.index;
      const value = relevance.values[part];
      const swatch = relevance.has(part) ? this.page.colors.of(value, limit) : null;
      node.style.backgroundColor = swatch?.css ?? "";
      node.style.color = swatch?.text ?? "";
      node.className = ["part", ...this.#classes(part)].join(" ");
      node.setAttribute("aria-selected", String(this.#holds(part, this.panel.pick)));
    }
  }

  #classes(part) {
    const { relevance, pick, other } = this.panel;
    const { example, page } = this;
    const [first, end] = this.unit.bounds[part];
    return [
      !this.shapes[part].before && "joined",
      this.#outputs(part).length && "output",
      relevance.gone.has(part) ? "gone" : relevance.hidden.has(part) && "hidden",
      part === relevance.own && !relevance.hidden.has(part) && !example.isLabeled && "reads",
      part > relevance.read && "unread",
      this.turns.isTemplate(part) && "template",
      example.readAs(this.unit, part) && "unknown",
      end - first === 1 && example.special.has(first) && "special",
      this.#holds(part, pick) && (this.page.state.span ? "picked" : "first"),
      other && this.#holds(part, other) && "second",
      page.pointed === part && "pointed",
    ].filter(Boolean);
  }

  // The outputs whose answers stand in this part.
  #outputs(part) {
    const { outputAt } = this.example;
    const [first, end] = this.unit.bounds[part];
    const outputs = range(end - first).map((k) => outputAt.get(first + k));
    return outputs.filter((output) => output !== undefined);
  }

  #holds(part, pick) {
    const at = this.page.state.span ?? this.example.standing(pick);
    const [first, end] = this.unit.bounds[part];
    return Boolean(at) && at[0] < end && first < at[1];
  }

  // An answer that the text ends before is written after it.
  #showAnswer() {
    const { pick, against } = this.panel;
    const isBeyond = this.example.standing(pick)?.[0] === this.example.tokens.length;
    this.answer.hidden = !isBeyond;
    if (!isBeyond) return;
    const { before, body } = cut(this.example.answer(pick).text);
    fill(this.answer, body);
    this.answer.style.marginInlineStart = before || against >= 0 ? "" : "0";
  }

  // The whole text in one column: the strongest part of each line, and the window in view.
  #drawOverview() {
    const { scrollHeight, clientHeight } = this.box;
    this.overview.hidden = scrollHeight <= clientHeight + 4;
    if (this.overview.hidden) return;
    this.overview.style.height = `${clientHeight}px`;
    const { relevance, limit } = this.panel;
    const { colors } = this.page;
    const { context, width, height } = brush(this.lines);
    const strongest = new Float32Array(Math.ceil(height / 2));
    const line = (part) => Math.floor((part / this.unit.count) * strongest.length);
    for (const part of relevance.order.toReversed()) strongest[line(part)] = relevance.values[part];
    strongest.forEach((value, y) => {
      if (!value) return;
      context.fillStyle = colors.of(value, limit).css;
      context.fillRect(3, 2 * y, width - 6, 2);
    });
    context.fillStyle = colors.ink;
    if (relevance.own >= 0) context.fillRect(0, 2 * line(relevance.own), width, 2);
    this.#moveWindow();
  }

  #moveWindow() {
    const { scrollHeight, clientHeight, scrollTop } = this.box;
    // A transform needs no layout, which would take long here.
    this.window.style.transform = `translateY(${(clientHeight * scrollTop) / scrollHeight}px)`;
    this.window.style.height = `${(100 * clientHeight) / scrollHeight}%`;
  }

  #jump(event) {
    const box = this.overview.getBoundingClientRect();
    const share = (event.clientY - box.top) / box.height;
    this.box.scrollTop = share * this.box.scrollHeight - this.box.clientHeight / 2;
  }

  // A finger cannot point without pressing: it chooses an output, and reads the numbers.
  #press(event) {
    this.#choose(partOf(event));
    if (event.pointerType === "touch") this.page.point(partOf(event), this);
  }

  #choose(part) {
    if (part < 0) return;
    const [output] = this.#outputs(part);
    if (output === undefined) return;
    this.page.set({ [this.panel.isSecond ? "b" : "t"]: String(output) });
  }

  #key(event) {
    if (hasModifier(event)) return;
    const { relevance } = this.panel;
    const at = this.page.pointed < 0 ? Math.max(relevance.own, 0) : this.page.pointed;
    const beside = (step) => {
      let to = at + step;
      while (relevance.gone.has(to)) to += step;
      return relevance.gone.has(clamp(to, 0, this.unit.count - 1)) ? at : to;
    };
    const to = {
      ArrowLeft: beside(-1),
      ArrowRight: beside(1),
      Home: 0,
      End: relevance.read,
      ...relevance.steps(this.page.pointed, at),
    }[event.key];
    if (to !== undefined) {
      const part = clamp(to, 0, this.unit.count - 1);
      this.reveal(part);
      this.page.point(part, this, { aloud: true });
    } else if (event.key === "Enter") this.#choose(at);
    else if (event.key === "Escape") this.page.point(-1);
    else return;
    taken(event);
  }
}

const partOf = (event) => event.target.index ?? event.target.inset?.partAt(event) ?? -1;
