// The dialog under "?": marks, words, keys, methods, and how the explanation was made.
import { element } from "./dom.js";
import { visible } from "./format.js";
import { MARKS, WORDS } from "./words.js";

const KEYS = [
  ["← → Home End", "in a group: choose; in the input or a map: move"],
  ["n N", "in the input: the next, the previous largest source"],
  ["Enter", "on an output in the text, or its row in a map: explain it"],
  ["p, Shift + click", "on an output: pin it as B and compare"],
  ["x", "contrast with the next answer"],
  ["m", "next method"],
  ["v", "view: one method, all methods, two outputs"],
  ["u", "next unit: tokens, words, …"],
  ["o", "the reading token (reads itself) shown or hidden"],
  ["t", "in a conversation: the template’s tokens shown or hidden"],
  ["Shift + ← → Home End", "in a whole answer: explain more, or fewer, of its words together"],
  ["h H", "of a whole answer: the next, the previous step back"],
  ["[ ]", "strongest color for more, for fewer values"],
  ["l", "next map"],
  ["+ − 0 Esc", "in a map: zoom, whole map, close"],
  ["e E", "the next, the previous listed example"],
  ["↑ ↓ in the circuit", "along the largest flow, to the answer or back to the text"],
  ["← → n N Home End", "in the circuit: beside; larger and smaller edges; the answer; the token of the path"],
  ["Enter, Esc", "in the circuit: only what flows through this; all again"],
  ["[ ] p", "in the circuit: fewer, more edges; the next path"],
  ["/", "find an example"],
  ["d", "dark or light"],
  ["?", "this list"],
];

export class Help {
  constructor({ settings, versions, methods }) {
    const details = [...Object.entries(settings), ...Object.entries(versions)]
      .map(([key, text]) => [visible(key), visible(text)]);
    this.letters = element("input", { type: "checkbox", checked: true });
    const close = element("button", { type: "button", class: "close" }, "Close");
    this.node = element("dialog", { "aria-label": "Words, marks and keys", tabindex: -1 },
      element("h3", {}, "In the text or picture"),
      pairs(MARKS.map(([kind, text]) => [element("span", { class: `sample ${kind}` }, "word"), text])),
      element("h3", {}, "Words and controls"),
      pairs(Object.values(WORDS)),
      element("h3", {}, "Keys"),
      pairs(KEYS.map(([keys, text]) => [element("kbd", {}, keys), text])),
      element("label", { class: "toggle" }, this.letters, "Single-letter keys"),
      element("h3", {}, "Methods"),
      pairs(methods.map(({ title, note }) => [visible(title), visible(note)])),
      details.length > 0 && [element("h3", {}, "Made with"), pairs(details)],
      close);
    close.addEventListener("click", () => this.node.close());
  }

  show() {
    this.node.showModal();
    this.node.scrollTop = 0;
  }

  get isOpen() {
    return this.node.open;
  }

  get hasLetters() {
    return this.letters.checked;
  }
}

const pairs = (entries) => element("dl", {}, entries.map(([term, text]) =>
  [element("dt", {}, term), element("dd", {}, text)]));
