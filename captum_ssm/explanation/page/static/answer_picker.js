// Picks a span of the answer in a text panel: drag, Shift + click, or Shift + arrow keys.
import { clamp, hasModifier, range, taken } from "./dom.js";

export class AnswerPicker {
  constructor(page, panel) {
    Object.assign(this, { page, panel, unit: panel.unit, whole: panel.example.whole });
    const { box } = panel;
    box.addEventListener("mousedown", (event) => this.#down(event));
    box.addEventListener("mousemove", (event) => this.#move(event));
    box.addEventListener("click", (event) => this.#click(event), { capture: true });
    box.addEventListener("keydown", (event) => this.#key(event), { capture: true });
  }

  get #first() {
    return this.unit.of[this.panel.example.prompt];
  }

  #isPickable(part) {
    return part >= this.#first && this.page.state.values.view !== "pair" && this.whole.canPick;
  }

  // No text is selected by a drag over the answer.
  #down(event) {
    const part = event.target.index ?? -1;
    if (event.button || !this.#isPickable(part)) return;
    event.preventDefault();
    this.panel.box.focus({ preventScroll: true });
    this.from = event.shiftKey ? this.#anchor : part;
    this.to = part;
    if (event.shiftKey) this.#show();
  }

  get #anchor() {
    const { span } = this.page.state;
    return span ? this.unit.of[span[0]] : this.#first;
  }

  #move(event) {
    const part = event.target.index ?? -1;
    if (this.from === undefined) return;
    if (!(event.buttons & 1)) {
      this.from = undefined;
      this.#clear();
    } else if (this.#isPickable(part) && part !== this.to) {
      this.to = part;
      this.#show();
    }
  }

  #show() {
    this.#clear();
    const [low, high] = [this.from, this.to].sort((a, b) => a - b);
    this.shown = range(high - low + 1).map((k) => this.panel.element(low + k)).filter(Boolean);
    for (const node of this.shown) node.classList.add("picking");
  }

  #clear() {
    for (const node of this.shown ?? []) node.classList.remove("picking");
    this.shown = null;
  }

  #click(event) {
    const part = event.target.index ?? this.to ?? -1;
    if (!this.#isPickable(part)) return;
    event.stopPropagation();
    const from = this.from ?? part;
    this.from = undefined;
    this.#clear();
    this.#pick(from, part);
    if (event.pointerType === "touch") this.page.point(part, this.panel);
  }

  #pick(from, to) {
    const { bounds } = this.unit;
    const [low, high] = [from, to].sort((a, b) => a - b);
    this.page.answer.pick([bounds[low][0], bounds[high][1]]);
  }

  #key(event) {
    if (hasModifier(event)) return;
    const { page, panel, unit } = this;
    if (event.key === "Enter" && this.#isPickable(page.pointed)) {
      this.#pick(page.pointed, page.pointed);
    } else if (event.shiftKey && this.whole.canPick) {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (!step) return;
      const [from, to] = this.#ends;
      const end = clamp(to + step, this.#first, unit.count - 1);
      this.#pick(from, end);
      this.extended = { from, to: end, span: page.state.values.span };
      panel.reveal(end);
      page.point(end, panel);
      page.answer.say();
    } else return;
    taken(event);
  }

  // The end that stays and the one that moves: of the span that was extended before, else of the part
  // that is pointed at, else of what is picked.
  get #ends() {
    const { page, unit } = this;
    const { span, values } = page.state;
    if (this.extended && this.extended.span === values.span && page.pointed === this.extended.to) {
      return [this.extended.from, this.extended.to];
    }
    if (this.#isPickable(page.pointed)) return [page.pointed, page.pointed];
    return span ? [unit.of[span[0]], unit.of[span[1] - 1]] : [this.#first, this.#first];
  }
}
