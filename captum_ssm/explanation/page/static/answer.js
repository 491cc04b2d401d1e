// The section of a whole answer: which span of it is explained, what that rests on in a sentence, the
// hops one by one, and the ways from the prompt through the reasoning.
import { AnswerPicker } from "./answer_picker.js";
import { AnswerPicture } from "./answer_picture.js";
import { writtenSpan } from "./answer_trace.js";
import { restsOn, spanName } from "./answer_words.js";
import { Choice } from "./controls.js";
import { element, fill } from "./dom.js";
import { percent, abridged, token } from "./format.js";
import { meaning } from "./words.js";

export class Answer {
  constructor(page) {
    this.page = page;
    this.spans = new Choice("picked", (span) => page.set({ span }), { kind: "segments spans" });
    this.steps = new Choice("hops", (hop) => page.set({ hop }));
    this.sentence = element("p", { class: "rests", "aria-live": "polite" });
    this.next = element("button", { type: "button", class: "action", onclick: () => this.step(1) });
    this.picture = new AnswerPicture(page);
    this.hint = element("p", { class: "quiet hint" });
    this.picking = element("div", { class: "line picking" }, this.spans.node, this.hint);
    this.node = element("section", { class: "whole-answer", "aria-label": "What the answer rests on" },
      this.picking,
      this.sentence, element("div", { class: "line" }, this.steps.node, this.next), this.picture.node);
  }

  attach(panel) {
    this.picker = new AnswerPicker(this.page, panel);
  }

  update(state) {
    const { example, span } = state;
    this.node.hidden = !example.whole;
    if (this.node.hidden) return;
    this.#showSpans(state);
    for (const part of [this.sentence, this.steps.node, this.next, this.picture.node]) part.hidden = !span;
    this.picking.hidden = !example.whole.canPick;
    const isTouched = matchMedia("(pointer: coarse)").matches;
    this.hint.textContent = isTouched ? "or tap a word of the answer in the text below; with Units: Sentence, a sentence"
      : "or drag over words of the answer in the text below (keyboard: Shift + arrow keys)";
    if (!span) return;
    const trace = state.trace(state.method);
    if (trace.isMissing) {
      for (const part of [this.steps.node, this.next, this.picture.node]) part.hidden = true;
      fill(this.sentence, "There is no relevance by this method.");
      return;
    }
    this.#showSteps(trace, state.values.hop);
    const said = restsOn(trace, state.values.hop, spanName(example.whole, span));
    if (this.sentence.textContent !== textOf(said)) fill(this.sentence, said);
    this.picture.update({ state, example, trace });
  }

  #showSpans({ example, span, values, pick }) {
    const { whole } = example;
    const text = ([first, end]) => token(abridged(example.text(first, end), 28));
    const options = whole.offered.map(({ name, span: one }) => ({
      value: writtenSpan(one), content: name ? `The whole ${name}` : text(one) }));
    const isOffered = options.some(({ value }) => value === values.span);
    if (span && !isOffered) options.push({ value: values.span, content: text(span) });
    if (!span) options.push({ value: "", content: token(example.answer(pick).text) });
    this.spans.show(options, values.span);
  }

  #showSteps(trace, hop) {
    const { names } = trace;
    this.steps.node.hidden = names.length < 2;
    this.steps.show(names.map((value) => ({ value, ...named(trace, value) })), hop);
    this.next.hidden = names.length < 2;
    const isLast = hop === "all";
    const follows = names[names.indexOf(hop) + 1] === "all" ? "All steps together" : "Follow its own words one step back";
    fill(this.next, isLast ? "Start again" : follows, " ", element("kbd", { "aria-hidden": "true" }, "h"));
  }

  // The next hop, or the one before; after the last one the first.
  step(way) {
    const { state } = this.page;
    if (!state.span) return;
    const { names } = state.trace(state.method);
    const at = names.indexOf(state.values.hop);
    this.page.set({ hop: names[(at + way + names.length) % names.length] });
  }

  // Explain the tokens of the continuation from `first` to `end`.
  pick(tokens) {
    const span = this.page.state.example.whole.nearest(tokens);
    if (span) this.page.set({ span: writtenSpan(span) });
  }

  // A box of the picture is pressed: own words are explained, others are found in the text.
  press([first, end], part) {
    const { example, unit } = this.page.state;
    const isOwn = first >= example.prompt && example.whole.nearest([first, end]);
    if (isOwn && example.whole.canPick) this.page.set({ span: writtenSpan(isOwn) });
    else this.page.reveal(unit.of[first], part);
  }

  // What is picked, for those who listen.
  say() {
    const { span, example, pick } = this.page.state;
    const text = span ? example.text(...span) : example.answer(pick).text;
    this.page.live.textContent = `Picked: ${abridged(text, 200)}`;
  }
}

function named(trace, hop) {
  if (hop === "all") return { content: "All steps", title: meaning("allHops") };
  if (hop === "0") return { content: "Directly", title: meaning("hop0") };
  return { content: [`${hop} back`, element("small", {}, ` · ${percent(trace.reached[hop])}`)], label: `${hop} back, ${percent(trace.reached[hop])}`,
    title: meaning("hop") };
}

const textOf = (contents) => element("p", {}, contents).textContent;
