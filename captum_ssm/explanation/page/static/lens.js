// What the model would put out after each layer: the logit lens.
import { ofWhole, styled } from "./bars.js";
import { element, fill } from "./dom.js";
import { likely, token } from "./format.js";

export class Lens {
  constructor() {
    this.table = element("table", { class: "lens" });
    this.node = element("section", { class: "layers" },
      element("h2", { class: "label", "data-word": "lens" }, "Answers by layer"),
      element("p", { class: "quiet" },
        "The likeliest answers after each layer, by the model's own final norm and head."),
      element("div", { class: "scroller", tabindex: 0, role: "group", "aria-label": "Answers by layer" },
        this.table));
  }

  update({ example, state }) {
    const { lens, answers } = example.outputs[state.pick.output];
    this.node.hidden = lens.length === 0 || (state.span !== null && !state.isOneToken);
    const { id, text } = answers[state.pick.answer];
    fill(this.table, lens.map((layer, k) => element("tr", {},
      element("th", { scope: "row" }, k === lens.length - 1 ? `${k} · last` : String(k)),
      layer.map((answer) => element("td", { class: answer.text === text ? "same" : "" }, token(answer.text),
        element("small", {}, likely(answer)), element("i", {}, styled("b", { width: ofWhole(answer.p) })))))));
  }
}
