// Mean shares as bars with their intervals, and what differs as a pair of marks.
import { barLine, ofWhole, styled, whisker } from "./bars.js";
import { element } from "./dom.js";
import { count, name, percent } from "./format.js";

const intervalTold = (share, low, high, examples) =>
  `${percent(share)}, 95% interval ${percent(low)} to ${percent(high)}, in ${count(examples, "example")}`;

// Entries are [key, examples, share, low, high, total, leaning].
export function shareBars(entries, colors, choose) {
  const top = Math.max(...entries.map(([, , , , high]) => high), 1e-9);
  return element("ol", { class: "shares" }, entries.map(([key, examples, share, low, high, , leaning]) => {
    const bar = styled("i", { width: ofWhole(share, top), backgroundColor: colors.of(leaning || 1, 1.4).css });
    const told = intervalTold(share, low, high, examples);
    const found = element("button", { type: "button", class: "link token", "aria-label": `${name(String(key))}, ${told}; find it`,
      onclick: () => choose(String(key)) }, name(String(key)));
    return barLine(told, found, [bar, whisker(low, high, top)], percent(share), examples.toLocaleString("en"));
  }));
}

// Entries are [kind, key, here, elsewhere, low, high].
export function differenceBars(entries, words, choose) {
  const top = Math.max(...entries.flatMap(([, , here, elsewhere]) => [here, elsewhere]), 1e-9);
  return element("ol", { class: "shares" }, entries.map(([kind, key, here, elsewhere, low, high]) => {
    const [left, right] = [Math.min(here, elsewhere), Math.max(here, elsewhere)];
    const marks = [styled("u", { left: ofWhole(left, top), width: ofWhole(right - left, top) }),
      styled("s", { left: ofWhole(elsewhere, top) }), styled("em", { left: ofWhole(here, top) })];
    const called = keyName(kind, key);
    const told = `${words[0]} ${percent(here)}, ${words[1]} ${percent(elsewhere)}; the difference is `
      + `${points(low)} to ${points(high)} points`;
    const found = element("button", { type: "button", class: "link token", "aria-label": `${called}: ${told}`,
      onclick: () => choose(String(key)) }, called);
    return barLine(told, found, marks, points(here - elsewhere), "points");
  }));
}

const points = (value) => `${value < 0 ? "−" : "+"}${(100 * Math.abs(value)).toFixed(1)}`;

// What a key of a kind is called.
export function keyName(kind, key) {
  if (kind === "tenth") return `${10 * key}–${10 * key + 10}% of the text`;
  return name(String(key));
}

// A column per key, in the order of keys.
export function orderedColumns(kind, entries, reference, colors) {
  const sorted = [...entries].sort(([a], [b]) => a - b).slice(0, 40);
  if (kind === "distance" || kind === "end") sorted.reverse();
  const all = new Map(reference?.map((entry) => [entry[0], entry[2]]));
  const top = Math.max(...sorted.map(([, , , , high]) => high), ...(reference ? all.values() : []), 1e-9);
  const columns = sorted.map(([key, examples, share, low, high, , leaning]) => {
    const bar = styled("i", { height: ofWhole(share, top), backgroundColor: colors.of(leaning || 1, 1.4).css });
    const mark = all.has(key) && styled("u", { bottom: ofWhole(all.get(key), top) });
    const told = `${keyTold(kind, key)}: ${intervalTold(share, low, high, examples)}`
      + `${all.has(key) ? `; of all examples ${percent(all.get(key))}` : ""}`;
    return element("li", { "data-tip": told, "aria-label": told }, element("span", { class: "column" }, bar, whisker(low, high, top, true), mark),
      element("small", { class: "quiet" }, keyTick(kind, key)));
  });
  return element("ol", { class: "columns" }, columns);
}

const binned = (key) => (Math.abs(key) < 16 ? `${key}` : `${key}–${Math.sign(key) * (2 * Math.abs(key) - 1)}`);

function keyTick(kind, key) {
  if (kind === "tenth") return `${10 * key}%`;
  return Math.abs(key) < 16 ? String(key).replace("-", "−") : `${String(key).replace("-", "−")}…`;
}

function keyTold(kind, key) {
  return {
    tenth: () => keyName("tenth", key),
    start: () => `${binned(key)} tokens after the first`,
    end: () => `${binned(key)} tokens before the last that is read`,
    distance: () => (key < 0 ? `${binned(-key)} tokens after the one that the answer is read from` : `${binned(key)} tokens before the one that the answer is read from`),
  }[kind]();
}
