// Every example in a table that is searched and sorted; some of them open.
import { element, fill, tableParts, tableRow } from "./dom.js";
import { count, name, percent, visible } from "./format.js";

const LINES_AT_ONCE = 25;
export const LIST_ORDERS = {
  index: "in the order of the data", untypical: "least typical first", typical: "most typical first",
  wrong: "wrong and unlikely first", moved: "most changed first",
};
const ORDER_KEYS = {
  index: ({ index }) => index, untypical: ({ distance }) => -distance, typical: ({ distance }) => distance,
  wrong: ({ right, p }) => (right === false ? 0 : 2) + (p ?? 0), moved: ({ moved }) => -(moved ?? 0),
};

export class LineList {
  constructor(report) {
    this.report = report;
    this.most = LINES_AT_ONCE;
    this.find = element("input", { type: "search", placeholder: "Find in examples (/)", "aria-label": "Find in examples",
      oninput: () => { this.most = LINES_AT_ONCE; report.set({ find: this.find.value }); } });
    const { hasChange, hasRight } = report;
    const offered = Object.entries(LIST_ORDERS).filter(([key]) => (key !== "moved" || hasChange) && (key !== "wrong" || hasRight));
    this.sort = element("select", { "aria-label": "Order", onchange: () => report.set({ sort: this.sort.value }) },
      offered.map(([key, text]) => element("option", { value: key }, text)));
    this.found = element("span", { class: "quiet", "aria-live": "polite" });
    this.table = element("table", { class: "lines" });
    this.more = element("button", { type: "button", class: "action",
      onclick: () => { this.most += 4 * LINES_AT_ONCE; this.update(); } }, "More");
    this.node = element("section", { class: "list-all" }, element("h2", {}, "All examples"),
      element("div", { class: "search" }, this.find, this.sort, this.found),
      element("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": "Table of examples" }, this.table), this.more);
  }

  update() {
    const { report, most } = this;
    const { find, sort } = report.values;
    const wanted = find.trim().toLowerCase();
    if (this.find.value !== find) this.find.value = find;
    this.sort.value = sort;
    const lines = report.lines.filter((line) => report.isIn(line)
      && (!wanted || `${line.text} ${line.target} ${line.prediction ?? ""}`.toLowerCase().includes(wanted)));
    lines.sort((a, b) => ORDER_KEYS[sort](a) - ORDER_KEYS[sort](b) || a.index - b.index);
    this.found.textContent = count(lines.length, "example");
    const { hasRight, hasChange, hasGroups, data } = report;
    const heads = ["row", "text", "explained", hasRight && "predicted", "probability", hasGroups && "group",
      ...data.columns, "distance", hasChange && "moved"].filter(Boolean);
    fill(this.table, tableParts(heads.map(visible), lines.slice(0, most).map((line) => tableRow(
      [
        report.texts.has(line.index)
          ? element("button", { type: "button", class: "link", "aria-label": `Open example ${line.index}`, onclick: () => report.open(line.index) }, String(line.index))
          : String(line.index),
        visible(line.text), name(line.target), hasRight && (line.prediction === null ? "right" : name(line.prediction)),
        line.p === null ? "·" : percent(line.p), hasGroups && visible(line.group ?? "·"),
        ...data.columns.map((column) => visible(String(line[`column ${column}`] ?? "·"))),
        line.distance.toFixed(2), hasChange && (line.moved === null ? "·" : percent(line.moved) + (line.flipped ? ", flipped" : "")),
      ].filter((cell) => cell !== false), { class: line.right === false && "wrong" }))));
    this.more.hidden = lines.length <= most;
  }
}
