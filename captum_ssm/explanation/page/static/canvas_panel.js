// What pictures and series share: a canvas that is pointed at, and walked over by keys.
import { element, hasModifier, taken } from "./dom.js";
import { digits } from "./format.js";

// Subclasses say what lies under the pointer (`partAt`), where a part is drawn (`areas`), where the arrow
// keys lead (`steps`), and how all of it is drawn (`draw`).
export class CanvasPanel {
  scroll = 0;

  constructor(page, panel, { kind, name, above = null }) {
    this.page = page;
    this.example = page.view.example;
    this.unit = page.view.unit;
    const point = (event) => page.point(this.partAt(event), this);
    this.canvas = element("canvas", {
      class: kind,
      role: "img",
      tabindex: 0,
      "aria-label": `${name}, ${panel.method.title}: arrow keys move, N goes to the next largest`,
      onpointermove: point,
      onpointerdown: point,
      onpointerleave: ({ pointerType }) => pointerType === "touch" || page.point(-1),
      onblur: () => page.point(-1),
      onkeydown: (event) => this.#key(event),
    });
    this.note = element("span", { class: "quiet" });
    this.node = element("section", { class: "panel" },
      panel.title && element("header", {}, panel.title, this.note), above, this.canvas);
  }

  update(panel) {
    this.panel = panel;
    this.note.textContent = `scale ±${digits(panel.limit)}`;
    this.draw();
  }

  dispose() {}
  print() {}
  describe() {}

  reveal() {
    this.canvas.scrollIntoView({ block: "nearest" });
  }

  anchor(part) {
    const box = this.canvas.getBoundingClientRect();
    const [{ x, y, width, height }] = this.areas(part);
    return new DOMRect(box.x + x, box.y + y, width, height);
  }

  #key(event) {
    if (hasModifier(event)) return;
    const { pointed } = this.page;
    const at = Math.max(pointed, 0);
    const to = {
      ...this.steps(at), Home: 0, End: this.unit.count - 1, ...this.panel.relevance.steps(pointed, at),
    }[event.key];
    if (to !== undefined) this.page.point(to, this, { aloud: true });
    else if (event.key === "Escape") this.page.point(-1);
    else return;
    taken(event);
  }
}
