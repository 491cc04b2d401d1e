// The one tooltip: numbers of the part that is pointed at, or what a word or a control means.
import { element, fill } from "./dom.js";
import { meaning } from "./words.js";

const DELAY = 350; // milliseconds: a pointer that only passes gets no explanation
let tips = 0;

export class Tip {
  constructor(root, signal) {
    this.root = root;
    this.node = element("div", { class: "tip", role: "tooltip", id: `captum-tip-${tips++}`, hidden: true });
    root.addEventListener("pointerover", ({ target, pointerType }) =>
      this.#explain(target, pointerType === "touch" ? 0 : DELAY), { signal });
    root.addEventListener("pointerout", (event) => this.#leave(event), { signal });
    root.addEventListener("pointerdown", (event) => this.#leave(event), { signal });
    root.addEventListener("focusin", ({ target }) => {
      if (target.matches(":focus-visible")) this.#explain(target, 0);
    }, { signal });
    root.addEventListener("focusout", () => this.#end(), { signal });
    signal.addEventListener("abort", () => clearTimeout(this.timer));
  }

  // Above the anchor, where that does not cover what lies above the ceiling; else below it.
  show(anchor, content, ceiling = 0) {
    this.#end();
    fill(this.node, content);
    this.node.hidden = false;
    this.#moveTo(anchor, ceiling);
  }

  hide() {
    if (!this.explained) this.node.hidden = true;
  }

  // A finger leaves as soon as it is lifted: then the tooltip stays until the next touch.
  #leave({ type, pointerType, target, relatedTarget }) {
    const from = target.closest("[data-word], [data-tip]");
    if (type === "pointerout" && (pointerType === "touch" || from?.contains(relatedTarget))) return;
    if (type === "pointerdown" && pointerType === "touch" && from === this.wanted) return;
    this.#end();
  }

  #explain(target, delay) {
    const node = target.closest("[data-word], [data-tip]");
    if (!node || !this.root.contains(node) || node === this.wanted) return;
    this.#end();
    this.wanted = node;
    this.timer = setTimeout(() => {
      if (!node.isConnected) return;
      this.explained = node;
      node.setAttribute("aria-describedby", this.node.id);
      const { word, tip } = node.dataset;
      fill(this.node, element("div", { class: "meaning" }, tip ?? meaning(word)));
      this.node.hidden = false;
      this.#moveTo(node.getBoundingClientRect(), Infinity);
    }, delay);
  }

  #end() {
    clearTimeout(this.timer);
    this.wanted = null;
    if (!this.explained) return;
    this.explained.removeAttribute("aria-describedby");
    this.explained = null;
    this.node.hidden = true;
  }

  #moveTo(anchor, ceiling) {
    const page = this.root.getBoundingClientRect();
    const { width, height } = this.node.getBoundingClientRect();
    const middle = anchor.left + anchor.width / 2 - width / 2;
    const left = Math.max(page.left + 8, Math.min(middle, page.right - width - 8));
    const [above, below] = [anchor.top - height - 8, anchor.bottom + 8];
    const isAbove = above > Math.max(4, ceiling - 4) || below + height > innerHeight;
    this.node.style.left = `${left - page.left}px`;
    this.node.style.top = `${(isAbove ? above : below) - page.top}px`;
  }
}
