// The stage: one text, picture or plot per method or output that is shown.
import { element, fill } from "./dom.js";
import { token, visible } from "./format.js";
import { ImagePanel } from "./image.js";
import { SeriesPanel } from "./series.js";
import { TextPanel } from "./text.js";

export class Panels {
  constructor(page) {
    this.page = page;
    this.node = element("div", { class: "stage" });
    this.panels = [];
  }

  get first() {
    return this.panels[0].drawn;
  }

  // Where the stage begins in the window.
  get top() {
    return this.node.getBoundingClientRect().top;
  }

  dispose() {
    for (const { drawn } of this.panels) drawn.dispose();
  }

  print() {
    for (const { drawn } of this.panels) drawn.print();
  }

  mark(part, before) {
    for (const { drawn } of this.panels) drawn.mark(part, before);
  }

  reveal(part) {
    for (const { drawn } of this.panels) drawn.reveal(part);
  }

  update({ panels, state }) {
    const { values, example } = state;
    const kind = [values.e, values.view, values.u, values.template, values.view === "all" || values.m].join();
    if (kind !== this.kind) this.#build(kind);
    else panels.forEach((panel, k) => {
      panel.drawn = this.panels[k].drawn;
    });
    this.panels = panels;
    for (const panel of panels) {
      const title = panel.drawn.node.querySelector("header strong");
      const letter = panel.isSecond ? "B " : "A ";
      if (title) fill(title, letter, token(example.answer(panel.pick).text));
      const isChosen = values.view === "all" && panel.method === state.method;
      panel.drawn.node.classList.toggle("chosen", isChosen);
      panel.drawn.update(panel);
    }
  }

  #build(kind) {
    const { page } = this;
    const { values, example } = page.state;
    const scrolls = this.panels.map(({ drawn }) => drawn.scroll);
    const { activeElement } = document;
    const focused = this.panels.findIndex(({ drawn }) => drawn.node.contains(activeElement));
    this.dispose();
    const isSameText = this.kind?.split(",")[0] === String(values.e);
    this.kind = kind;
    const { panels, unit } = page.view;
    const Panel = example.isImage ? ImagePanel : example.isSeries ? SeriesPanel : TextPanel;
    for (const panel of panels) {
      panel.title = this.#title(panel);
      panel.drawn = new Panel(page, panel);
      if (example.whole) page.answer.attach(panel.drawn);
    }
    this.node.className = `stage ${values.view}`;
    fill(this.node, panels.map(({ drawn }) => drawn.node));
    panels.forEach(({ drawn, pick }, k) => {
      if (isSameText) drawn.scroll = scrolls[k] ?? scrolls[0];
      else if (example.isText) drawn.reveal(unit.of[page.state.span?.[0] ?? example.outputs[pick.output].position ?? 0]);
    });
    if (focused < 0) return;
    const { drawn } = panels[Math.min(focused, panels.length - 1)];
    drawn.node.querySelector("[tabindex]").focus({ preventScroll: true });
  }

  #title({ method }) {
    const { page } = this;
    return {
      all: () => element("button", {
        type: "button", "data-tip": visible(method.note), onclick: () => page.set({ m: method.name }),
      }, visible(method.title)),
      pair: () => element("strong"),
      one: () => null,
    }[page.state.values.view]();
  }
}
