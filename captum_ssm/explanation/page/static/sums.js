// What is in the numbers and what is not, in words: hidden parts, and what no part is given.
import { added } from "./dom.js";
import { count, listed, name, percent, plain, signed, token, visible } from "./format.js";

const LITTLE = 0.02; // of the score

export function sums(view) {
  const { listed, state } = view;
  if (state.values.view !== "pair") return sumOf(view, listed[0]);
  return listed.flatMap((each) => {
    const letter = each.isSecond ? "B" : "A";
    const [first, ...rest] = sumOf(view, each);
    return [[`${letter} `, token(state.example.answer(each.pick).text), ": ", first].flat(), ...rest];
  });
}

function sumOf(view, { method, relevance, pick, against }) {
  if (relevance.isMissing) return [`The explanation has no relevance by ${visible(method.title)} for this.`];
  const shares = `Percentages are of the ${count(relevance.shown, view.unit.name)} shown.${picturesOf(view, relevance)}`;
  const rest = [...hiddenOf(view, relevance), balance(view, method, relevance, pick, against)];
  return [shares, rest.join(" ")];
}

// What images and sound have of it, each by itself.
function picturesOf({ example, unit }, relevance) {
  if (!example.pictures.length) return "";
  const told = example.pictures.map((picture) => {
    const { share, sum } = relevance.of([...new Set(picture.tokens.map((token) => unit.of[token]))]);
    return `${visible(picture.name)} has ${percent(share)} (${signed(sum)})`;
  });
  return ` Of that, ${listed(told)}, and the text has the rest.`;
}

function hiddenOf({ example, unit }, relevance) {
  const { gone, hidden, values, everything } = relevance;
  const size = (parts) => percent(added(parts, (part) => Math.abs(values[part])) / everything);
  const read = [...hidden].filter((part) => part <= relevance.read);
  const template = read.filter((part) => gone.has(part));
  const sentences = read.filter((part) => !gone.has(part)).map((part) => {
    const text = example.isText ? name(example.partText(unit, part)) : example.placeName(unit, part);
    return `“${text}” (${signed(values[part])}, ${size([part])} of all magnitudes) is hidden.`;
  });
  if (relevance.apart) {
    const share = percent(Math.abs(relevance.apart) / everything);
    const what = `What each word has from the token that it is read from${template.length ? ", and from the template" : ""}`;
    sentences.unshift(`${what} (${signed(relevance.apart)}, ${share} of all magnitudes) is hidden.`);
  }
  if (!template.length || relevance.apart) return sentences;
  const sum = signed(added(template, (part) => values[part]));
  return [...sentences, `The template (${sum}, ${size(template)} of all magnitudes) is hidden.`];
}

// Whether relevance adds up to the score, by how much it does not, and why.
function balance({ example, unit, state }, method, relevance, pick, against) {
  if (!method.adds_up && relevance.score !== null) return ofBaseline(relevance);
  if (!method.adds_up) {
    const isDifference = against >= 0 && !relevance.isDirect;
    return `${visible(method.title)} does not add up to the ${isDifference
      ? "logits, and its difference explains no difference of logits." : "logit: only its shares have a meaning."}`;
  }
  if (state.span && relevance.score === null) return "";
  const { answers } = example.outputs[pick.output];
  const logit = answers[pick.answer].logit - (against < 0 ? 0 : answers[against].logit);
  const all = `All relevance adds up to ${signed(relevance.sum)}; `;
  if (relevance.score === null) {
    return `${all}the ${against < 0 ? "logit is" : "logits differ by"} ${plain(logit)}.`;
  }
  const rest = relevance.score - relevance.sum;
  const share = Math.abs(rest) / (Math.abs(relevance.score) || 1);
  const said = `${all}the explained score is ${signed(relevance.score)}.`;
  if (share < 1e-4) return said;
  const why = method.rest || "bias terms, constants of the model that read no input";
  const missing = share < LITTLE ? "" : `is given to no ${unit.name}: it `;
  const much = share > 1 ? "" : ` (${percent(share)})`; // of a score near zero it tells nothing
  return `${said} The missing ${signed(rest)}${much} ${missing}comes from ${why}.`;
}

// Methods that compare with a baseline add up to what the score has above it, where they do.
function ofBaseline({ sum, score }) {
  const off = Math.abs(score - sum) / (Math.abs(score) || 1);
  const said = `All relevance adds up to ${signed(sum)}; the score minus that at the baseline is ${signed(score)}.`;
  if (off < 0.01) return said;
  return `${said} The method misses ${off > 1 ? "more than all" : percent(off)} of it, so its shares are not exact either: more steps (n_steps) bring the two together.`;
}
