// The slices of a corpus, a row each, and what the corpus tells in one sentence.
import { ofWhole, styled } from "./bars.js";
import { added, element, range } from "./dom.js";
import { count, name, percent, quoted, visible } from "./format.js";

export const SLICED_BY = { __proto__: null, group: "Where they look", prediction: "Right and wrong", target: "Answer" };
export const slicedBy = (by) => SLICED_BY[by] ?? visible(by === "column" ? "Column" : by);

// The fewest tenths in a row that hold half of the relevance.
export function halfOf(entries) {
  const shares = range(10).map((k) => entries.find(([key]) => key === k)?.[2] ?? 0);
  const half = added(entries, ([, , share]) => share) / 2;
  for (const width of range(10).map((k) => k + 1)) {
    const sums = range(11 - width).map((first) => added(shares.slice(first, first + width)));
    const first = sums.indexOf(Math.max(...sums));
    if (sums[first] >= half - 1e-9) return { first, end: first + width, share: sums[first] / (2 * half || 1) };
  }
  return { first: 0, end: 10, share: 1 };
}

const stretch = ({ first, end }) => (end === 10 && first === 0 ? "in all of the text"
  : end === 10 ? `in the last ${10 * (end - first)}% of the text`
    : first === 0 ? `in the first ${10 * end}% of the text` : `between ${10 * first}% and ${10 * end}% of the text`);

export function corpusSentence(shares, units) {
  const part = shares.part?.[0];
  const half = halfOf(shares.tenth);
  const where = `${percent(half.share)} of the relevance lies ${stretch(half)}`;
  if (part) return [`The part `, quoted(String(part[0])), ` carries ${percent(part[2])}, and ${where}.`];
  const top = (shares[units] ?? []).slice(0, 3).map(([key]) => quoted(String(key)));
  const listed = top.length === 3 ? [top[0], ", ", top[1], " and ", top[2]] : top.length === 2 ? [top[0], " and ", top[1]] : top;
  return ["Answers rest most on ", listed, `; ${where}.`];
}

export function sliceRow(part, shares, isChosen, { hasRight, choose }) {
  const tenths = range(10).map((k) => part.shares.tenth.find(([key]) => key === k)?.[2] ?? 0);
  const top = Math.max(...tenths, 1e-9);
  const marks = tenths.map((share) => styled("i", { height: ofWhole(share, top) }));
  const more = part.apart.filter(([kind, , , , low]) => low > 0 && !["tenth", "layer"].includes(kind)).slice(0, 4);
  return element("tr", { class: isChosen && "chosen" },
    element("td", {}, element("button", { type: "button", class: "link", "aria-pressed": String(isChosen), onclick: choose }, visible(part.name))),
    element("td", {}, part.count.toLocaleString("en")),
    hasRight && element("td", {}, part.right === null ? "·" : percent(part.right)),
    element("td", {}, element("span", { class: "spark", role: "img",
      "aria-label": `Shares of the tenths of the text: ${tenths.map(percent).join(", ")}` }, marks)),
    element("td", { class: "more" }, more.map(([, key], k) => [k > 0 && " · ", element("span", { class: "token" }, name(String(key)))])));
}

export function reportFacts(data) {
  return [
    count(data.count, "example"),
    data.right === null ? "" : `${percent(data.right)} predicted right`,
    data.own > 0.005 ? `${percent(data.own)} of the relevance lies on the token that the answer is read from, which is left out here` : "",
    data.failed ? `${count(data.failed, "row")} could not be explained` : "",
  ].filter(Boolean).join(" · ");
}
