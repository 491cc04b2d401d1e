// Marks of shares: bars, intervals, and the lines of a list that have them.
import { element } from "./dom.js";

export const ofWhole = (value, whole = 1) => `${(100 * value) / whole}%`;

export function styled(tag, style) {
  const node = element(tag);
  Object.assign(node.style, style);
  return node;
}

// From `low` to `high`: along a line, or upright.
export function whisker(low, high, whole, isUpright = false) {
  const [start, size] = isUpright ? ["bottom", "height"] : ["left", "width"];
  return styled("b", { [start]: ofWhole(low, whole), [size]: ofWhole(high - low, whole) });
}

// From the middle to the right, or to the left where it opposes; a share of 1 fills its side.
export function sidedBar(share, colors) {
  return element("span", { class: "bar" }, styled("i", { backgroundColor: colors.side(share),
    width: `${50 * Math.min(1, Math.abs(share))}%`, [share < 0 ? "right" : "left"]: "50%" }));
}

// A line of a list: what it is of, its marks, and two numbers.
export function barLine(told, called, marks, number, small) {
  return element("li", { "data-tip": told }, called,
    element("span", { class: "track", "aria-hidden": "true" }, marks),
    element("span", { class: "number" }, number),
    element("small", { class: "quiet" }, small));
}
