// Every term, mark and control of the page in words: a tooltip where it stands, a line under "?".
// A control is named by its key, so that its label and its explanation stay together.

export const WORDS = {
  outputs: ["Outputs", "Each token that was explained, with the probability that the model gave it. Choose one to see why it was given. Shift + click pins a second one as B."],
  answers: ["Answers", "The likeliest answers at this place. Choose another one to see what supports it."],
  bare: ["Gray answers", "They were not explained. explain(…, alternatives=5) explains the five likeliest; target= and against= explain one of your choice."],
  contrast: ["Contrast with", "Explains the difference of two scores: what makes the model prefer one answer to the other. What supports both cancels out."],
  method: ["Method", "How relevance was computed. Methods differ in what they count, so compare their patterns, not their values."],
  view: ["View", "One method; all methods next to each other, each on a scale of its own; or two outputs on a common scale."],
  units: ["Units", "Relevance is summed over these parts of the input."],
  own: ["Reading token (reads itself)", "The token that the answer is read from: the last one before it, or, of a classifier, often the last one or [CLS]. It always reads itself, and is often the largest by far. Hidden, it is hatched and not colored, so that the others can be seen; the list has its value."],
  last: ["Prompt’s last token", "The token before the first answer. Later answers often read much from it. Hides it like the token that reads itself."],
  template: ["Template’s tokens", "What no message says: the chat template writes it around the turns, such as marks for who speaks. Hidden tokens are left out of the text, the colors and the percentages; the line under the list has their sum."],
  turn: ["Turn", "Who says what follows, counted by role, and the share of all of its tokens that are shown. Units: Turn sums relevance over each."],
  color: ["Strongest color", "Which values get the strongest color. A lower limit shows weak sources; stronger ones then all look alike."],
  least: ["Hide below", "Sources with a smaller share are neither colored nor listed."],
  scale: ["Color scale", "Orange supports the answer, blue opposes it. Each thin line above the scale is one part of the input."],
  beyond: ["Off the scale", "Values that are larger than the end of the scale. They have the strongest color, and the list has their values."],
  relevance: ["Relevance", "How much a part of the input adds to the answer’s score (plus) or takes from it (minus), by this method."],
  share: ["Share", "The magnitude of a value, in percent of the sum of all magnitudes that are shown."],
  list: ["Largest sources", "The parts of the input with the largest relevance. A hatched row is hidden in the text, and has no share. Choose a row to find it in the input."],
  picture: ["Gray picture", "Shows the picture in light gray, so that all color is relevance. Off: the picture’s own colors."],
  opacity: ["Opacity", "How much of the picture the relevance covers."],
  grid: ["Grid", "Outlines the patches that the model reads."],
  lanes: ["Over time", "One lane per feature: the line is its value from the least to the largest, the color behind it the relevance of each step. Where a pixel stands for several steps, the strongest gives the color."],
  cells: ["Value", "The value of each feature, on the color of its relevance."],
  total: ["Total", "The sum of the relevance of a feature: what raises and what lowers the answer, taken together. A bar to the right raises it."],
  maps: ["Maps", "Which token (row) reads how much of which other (column), layer by layer. Choose one to see it large."],
  lens: ["Answers by layer", "What the model would answer if it stopped after each layer: the logit lens."],
  check: ["Check by removal", "Replaces parts of the input, the most relevant first, and runs the model again. The faster the score falls, the better a method names what the model reads."],
  area: ["Mean score", "The mean height of a method’s curve: the lower, the better. Random orders tell what any order would do."],
  examples: ["Examples", "Each text or picture that was explained, with the answer that is explained first. e and E step through the list."],
  find: ["Find", "Shows the examples whose text or name has these letters."],
  sort: ["Order", "As given, or by the probability of the explained answer."],
  only: ["Answer", "Shows the examples with this explained answer alone."],
  summary: ["Summary", "What the listed examples have in common: their answers, and the tokens with the largest mean share."],
  clicks: ["A click sets", "Which of the two outputs the next click chooses."],
  theme: ["Dark or light (d)", "Follows the system, or the notebook, until you choose."],
  help: ["Words, marks and keys (?)", "Everything on this page, in a sentence each."],
};

// Marks in the input itself, drawn as they look.
export const MARKS = [
  ["for", "supports the answer, by the method that is chosen: its share of the score is positive"],
  ["against", "opposes the answer: its share is negative"],
  ["hidden", "hatched: hidden from the colors, because it would outshine the rest"],
  ["reads", "solid line: the token that the answer is read from, where it is not hidden"],
  ["output", "dotted line: an explained output; click it to see why"],
  ["first", "box: the answer that is explained now"],
  ["second", "dashed box: the second answer, B"],
  ["unknown", "wavy line: the tokenizer does not know this word, so the model read its token for unknown words, such as <unk>, in its place"],
  ["template", "small: written by the chat template, in no message"],
  ["unread", "gray: comes later, so the model had not read it"],
];

export const term = (key) => WORDS[key][0];
export const meaning = (key) => WORDS[key][1];
