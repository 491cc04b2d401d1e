// What is explained, as a sentence, and what the model gives it.
import { element, fill, range } from "./dom.js";
import { count, likely, name, percent, plain, quoted, abridged, token } from "./format.js";

const HEADING_LETTERS = 90; // letters of an answer in the heading

// How a question about an output begins.
const ASKED = {
  span: "Why is the answer ",
  start: "Why does the answer start at ",
  end: "Why does the answer end at ",
};

export class Question {
  constructor() {
    this.title = element("h2", { class: "question" });
    this.facts = element("p", { class: "quiet" });
    this.node = element("section", { class: "ask" }, this.title, this.facts);
  }

  update({ example, values, pick, second, span, isOneToken }) {
    if (span && !isOneToken) {
      this.#ask(example, span);
      return;
    }
    const output = example.outputs[pick.output];
    const isPair = values.view === "pair";
    const answer = example.answer(pick);
    const other = isPair ? example.answer(second)
      : values.n >= 0 ? output.answers[values.n] : null;
    const link = isPair ? ", and why " : ", not ";
    const asked = ASKED[output.role] ?? "Why ";
    const of = output.role === "label" && [" for ", quoted(example.about(output))];
    const isNumber = answer.p === null && !other;
    if (isNumber) fill(this.title, "Why is ", quoted(answer.text), ` ${plain(answer.logit)}?`);
    else fill(this.title, asked, quoted(answer.text), of, other && [link, quoted(other.text)], "?");
    const others = isPair ? example.outputs[second.output] : output;
    fill(this.facts, "The model gives ", facts(answer, output),
      other && ["; ", facts(other, others)], ".");
  }

  // A span of a whole answer.
  #ask(example, [first, end]) {
    fill(this.title, "Why ", quoted(abridged(example.text(first, end), HEADING_LETTERS)), "?");
    const outputs = range(end - first).map((k) => example.outputs[example.outputAt.get(first + k)])
      .filter((output) => output?.role === "next");
    fill(this.facts, "The model gives ", element("b", {}, count(end - first, "token")), factsOf(example, outputs), ".");
  }
}

// How likely an answer of several tokens is, token by token.
function factsOf(example, outputs) {
  const likelihoods = outputs.map((output) => output.answers[output.chosen].p);
  const least = Math.min(...likelihoods);
  if (!outputs.length || likelihoods.includes(null)) return "";
  const { answers, chosen } = outputs[likelihoods.indexOf(least)];
  const product = likelihoods.reduce((all, p) => all * p, 1);
  return [", each after the one before, with a probability of ", element("b", {}, percent(product)), " together; the least likely one, ",
    token(answers[chosen].text), ", has ", element("b", {}, percent(least))];
}

const ranked = ({ rank }, { of }) => `rank ${rank}${of ? ` of ${of.toLocaleString("en")}` : ""}`;

function facts(answer, output) {
  const { text, p, logit } = answer;
  return [token(text), " ", element("b", {}, likely(answer)),
    p === null ? "" : ` · ${ranked(answer, output)} · logit ${plain(logit)}`];
}

// An answer in words, for a tooltip.
export function described(answer, output) {
  const { text, p } = answer;
  return `${name(text)}: ${likely(answer)}${p === null ? "" : `, ${ranked(answer, output)}`}`;
}
