// Several examples: a list to search, to sort and to filter, and what they have in common.
import { Choice } from "./controls.js";
import { center, element, fill } from "./dom.js";
import { count, likely, name, token, visible } from "./format.js";
import { ORDERS } from "./state.js";
import { meaning, term } from "./words.js";

const FEW = 8; // that many are seen at once, and need no search

export class Examples {
  constructor(page) {
    this.page = page;
    this.list = new Choice("examples", (e) => page.set({ e }), { kind: "examples", caption: null });
    this.find = element("input", { type: "search", placeholder: "Find in examples (/)",
      "aria-label": term("find"), "data-word": "find",
      oninput: () => page.set({ find: this.find.value }) });
    this.sort = picker("sort", (sort) => page.set({ sort }));
    this.only = picker("only", (only) => page.set({ only }));
    this.found = element("span", { class: "quiet", "aria-live": "polite" });
    this.summary = element("button", { type: "button", class: "action", "data-word": "summary",
      onclick: () => page.set({ summary: 1 - page.state.values.summary }) }, term("summary"));
    this.tools = element("div", { class: "search" }, this.find, this.sort, this.only, this.summary);
    const heading = element("div", { class: "heading" },
      element("span", { class: "label", "data-word": "examples" }, term("examples")), this.found);
    this.node = element("div", { class: "field list" }, heading, this.tools, this.list.node);
  }

  update(state) {
    const { examples, values, listed } = state;
    this.node.hidden = examples.length < 2;
    if (this.node.hidden) return;
    this.tools.hidden = examples.length <= FEW;
    this.found.textContent = listed.length === examples.length
      ? String(listed.length) : `${listed.length} of ${examples.length}`;
    if (this.find.value !== values.find) this.find.value = values.find;
    show(this.sort, Object.entries(ORDERS), values.sort);
    const answers = tally(examples.map(({ first }) => name(first.text)));
    show(this.only, [["", `all ${count(answers.length, "answer")}`],
      ...answers.map(([text, number]) => [text, `${text} (${number})`])], values.only);
    this.summary.setAttribute("aria-expanded", String(values.summary === 1));
    this.list.show(listed.map((k) => {
      const { name: title, first } = examples[k];
      const content = [
        element("span", {}, visible(title)), token(first.text), element("small", {}, likely(first)),
      ];
      return { value: k, content };
    }), values.e);
    if (!this.list.checked && listed.length) this.list.buttons[0].tabIndex = 0;
    center(this.list.checked);
  }

  search() {
    if (this.tools.hidden || this.node.hidden) return;
    this.find.focus();
    this.find.select();
  }
}

// How often each value is there, the most frequent first.
export function tally(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

function picker(key, choose) {
  const node = element("select", { "aria-label": term(key), "data-tip": meaning(key),
    onchange: () => choose(node.value) });
  return node;
}

function show(select, options, value) {
  fill(select, options.map(([key, text]) => element("option", { value: key }, visible(text))));
  select.value = value;
}
