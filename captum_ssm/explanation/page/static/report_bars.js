// Mean shares as bars with their intervals, and what differs as a pair of marks.
import { element } from "./dom.js";
import { count, name, percent } from "./format.js";

// Entries are [key, examples, share, low, high, total, leaning].
export function shareBars(entries, colors, choose) {
  const top = Math.max(...entries.map(([, , , , high]) => high), 1e-9);
  return element("ol", { class: "shares" }, entries.map(([key, examples, share, low, high, , leaning]) => {
    const bar = element("i");
    bar.style.width = `${(100 * share) / top}%`;
    bar.style.backgroundColor = colors.of(leaning || 1, 1.4).css;
    const whisker = element("b");
    whisker.style.left = `${(100 * low) / top}%`;
    whisker.style.width = `${(100 * (high - low)) / top}%`;
    const told = `${percent(share)}, 95% interval ${percent(low)} to ${percent(high)}, in ${count(examples, "example")}`;
    return element("li", { "data-tip": told },
      element("button", { type: "button", class: "link token", "aria-label": `${name(String(key))}, ${told}; find it`,
        onclick: () => choose(String(key)) }, name(String(key))),
      element("span", { class: "track", "aria-hidden": "true" }, bar, whisker),
      element("span", { class: "number" }, percent(share)),
      element("small", { class: "quiet" }, examples.toLocaleString("en")));
  }));
}

// Entries are [kind, key, here, elsewhere, low, high].
export function differenceBars(entries, words, choose) {
  const top = Math.max(...entries.flatMap(([, , here, elsewhere]) => [here, elsewhere]), 1e-9);
  return element("ol", { class: "shares" }, entries.map(([kind, key, here, elsewhere, low, high]) => {
    const [left, right] = [Math.min(here, elsewhere), Math.max(here, elsewhere)];
    const line = element("u");
    line.style.left = `${(100 * left) / top}%`;
    line.style.width = `${(100 * (right - left)) / top}%`;
    const before = element("s");
    before.style.left = `${(100 * elsewhere) / top}%`;
    const after = element("em");
    after.style.left = `${(100 * here) / top}%`;
    const called = placeName(kind, key);
    const told = `${words[0]} ${percent(here)}, ${words[1]} ${percent(elsewhere)}; the difference is `
      + `${points(low)} to ${points(high)} points`;
    return element("li", { "data-tip": told },
      element("button", { type: "button", class: "link token", "aria-label": `${called}: ${told}`,
        onclick: () => choose(String(key)) }, called),
      element("span", { class: "track", "aria-hidden": "true" }, line, before, after),
      element("span", { class: "number" }, `${points(here - elsewhere)}`),
      element("small", { class: "quiet" }, "points"));
  }));
}

const points = (value) => `${value < 0 ? "−" : "+"}${(100 * Math.abs(value)).toFixed(1)}`;

// What a key of a kind is called.
export function placeName(kind, key) {
  if (kind === "tenth") return `${10 * key}–${10 * key + 10}% of the text`;
  return name(String(key));
}

// A column per place, in the order of places.
export function placeColumns(kind, entries, reference, colors) {
  const sorted = [...entries].sort(([a], [b]) => a - b).slice(0, 40);
  if (kind === "distance" || kind === "end") sorted.reverse();
  const all = new Map(reference?.map((entry) => [entry[0], entry[2]]));
  const top = Math.max(...sorted.map(([, , , , high]) => high), ...(reference ? all.values() : []), 1e-9);
  const columns = sorted.map(([key, examples, share, low, high, , leaning]) => {
    const bar = element("i");
    bar.style.height = `${(100 * share) / top}%`;
    bar.style.backgroundColor = colors.of(leaning || 1, 1.4).css;
    const whisker = element("b");
    whisker.style.bottom = `${(100 * low) / top}%`;
    whisker.style.height = `${(100 * (high - low)) / top}%`;
    const mark = element("u");
    if (all.has(key)) mark.style.bottom = `${(100 * all.get(key)) / top}%`;
    const told = `${placeTold(kind, key)}: ${percent(share)}, 95% interval ${percent(low)} to ${percent(high)}, in `
      + `${count(examples, "example")}${all.has(key) ? `; of all examples ${percent(all.get(key))}` : ""}`;
    return element("li", { "data-tip": told, "aria-label": told }, element("span", { class: "column" }, bar, whisker, all.has(key) && mark),
      element("small", { class: "quiet" }, placeTick(kind, key)));
  });
  return element("ol", { class: "columns" }, columns);
}

const binned = (key) => (Math.abs(key) < 16 ? `${key}` : `${key}–${Math.sign(key) * (2 * Math.abs(key) - 1)}`);

function placeTick(kind, key) {
  if (kind === "tenth") return `${10 * key}%`;
  return Math.abs(key) < 16 ? String(key).replace("-", "−") : `${String(key).replace("-", "−")}…`;
}

function placeTold(kind, key) {
  return {
    tenth: () => placeName("tenth", key),
    start: () => `${binned(key)} tokens after the first`,
    end: () => `${binned(key)} tokens before the last that is read`,
    distance: () => (key < 0 ? `${binned(-key)} tokens after the place of the answer` : `${binned(key)} tokens before the place of the answer`),
  }[kind]();
}
