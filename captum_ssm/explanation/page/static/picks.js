// What can be chosen: outputs, answers at one of them, and what an answer is contrasted with.
import { ofWhole, styled } from "./bars.js";
import { Choice } from "./controls.js";
import { center, element, hasModifier } from "./dom.js";
import { likely, name, token } from "./format.js";
import { described } from "./question.js";

const MOST_IN_TIP = 5;

export class Picks {
  constructor(page) {
    this.page = page;
    this.setsSecond = false;
    const choose = (value, event) => this.#choose(value, event);
    this.outputs = new Choice("outputs", choose, { kind: "chips" });
    this.outputs.group.addEventListener("keydown", (event) => {
      if (event.key !== "p" || hasModifier(event)) return;
      page.set({ view: "pair", b: event.target.dataset.value });
      event.stopPropagation();
    });
    this.answers = new Choice("answers", choose, { kind: "answers" });
    this.contrast = new Choice("contrast", (n) => page.set({ n }));
    this.clicks = new Choice("clicks", (isSecond) => {
      this.setsSecond = isSecond;
      page.update();
    });
    this.node = element("section", { class: "controls picks" }, this.outputs.node,
      element("div", { class: "line" }, this.answers.node, this.contrast.node, this.clicks.node));
  }

  #choose(written, event) {
    const { state } = this.page;
    const isSecond = event.shiftKey || (this.setsSecond && state.values.view === "pair");
    this.page.set(isSecond ? { view: "pair", b: written } : { t: written });
  }

  update(state) {
    const { example, values, pick, picks } = state;
    const isPair = values.view === "pair";
    const isSpan = state.span !== null && !state.isOneToken;
    const several = example.outputs.length > 1 && !state.span;
    this.outputs.node.hidden = !several;
    if (several) this.outputs.show(picks.map((each) => chip(state, each)), String(pick.output));
    center(this.outputs.checked);

    const output = example.outputs[pick.output];
    const explained = new Set(example.picks(pick.output).map((each) => each.answer));
    this.answers.node.hidden = isSpan || (isPair && several) || output.answers.length < 2;
    this.answers.caption.textContent = example.answersAre;
    this.answers.show(output.answers.map((answer, k) =>
      answerOption(state, { output: pick.output, answer: k }, answer, explained.has(k)),
    ), example.written(pick));

    this.clicks.node.hidden = !isPair;
    this.clicks.show([false, true].map((value) => ({ value, content: value ? "B" : "A" })), this.setsSecond);

    const contrasts = example.contrasts(pick);
    this.contrast.node.hidden = isPair || isSpan || contrasts.length < 2;
    this.contrast.show(contrasts.map((against) => {
      if (against < 0) return { value: -1, content: "none", title: "The answer by itself" };
      const answer = output.answers[against];
      return { value: against, content: token(answer.text), title: described(answer, output) };
    }), values.n);
  }
}

function chip({ example, values, second, pick: chosen }, pick) {
  const answer = example.answer(pick);
  const isPair = values.view === "pair";
  const isPinned = isPair && second.output === pick.output;
  const isFirst = isPair && pick.output === chosen.output;
  const mark = isPinned ? "B" : isFirst ? "A" : null;
  const output = example.outputs[pick.output];
  const about = example.about(output);
  return {
    value: String(pick.output),
    className: isPinned ? "second" : null,
    label: `${about ? `${name(about)}: ` : ""}${name(answer.text)}, ${likely(answer)}${isPinned ? ", pinned as B" : ""}`,
    title: output.answers.slice(0, MOST_IN_TIP).map((each) => described(each, output)).join("\n"),
    content: [
      about ? [element("small", {}, name(about)), " "] : null,
      token(answer.text), element("small", {}, likely(answer)),
      answer.p !== null && element("i", {}, styled("b", { width: ofWhole(answer.p) })), mark && element("em", {}, mark),
    ],
  };
}

function answerOption({ example, values, second }, pick, answer, isExplained) {
  const value = example.written(pick);
  const isPinned = values.view === "pair" && value === example.written(second);
  return {
    value,
    isDisabled: !isExplained,
    className: [isExplained ? "" : "bare", isPinned ? "second" : ""].join(" "),
    title: isExplained ? described(answer, example.outputs[pick.output]) : undefined,
    word: isExplained ? undefined : "bare",
    label: `${name(answer.text)}, ${likely(answer)}${isPinned ? ", pinned as B" : ""}`,
    content: [token(answer.text), element("small", {}, likely(answer))],
  };
}
