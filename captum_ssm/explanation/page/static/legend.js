// The scale: colors with their numbers, and one line for every part on them.
import { brush, clamp, element, fill } from "./dom.js";
import { count, digits, name } from "./format.js";

const BAND = 12;

export class Legend {
  constructor() {
    this.canvas = element("canvas", { role: "img" });
    this.ticks = element("div", { class: "ticks", "aria-hidden": "true" });
    this.node = element("figure", { class: "legend", "data-word": "scale" }, this.canvas, this.ticks);
  }

  update(view, colors) {
    const { listed, limit } = view;
    const { context, width, height } = brush(this.canvas);
    context.save();
    context.translate(0, height - BAND);
    colors.ramp(context, width, BAND);
    context.restore();

    let beyond = 0;
    context.fillStyle = colors.ink;
    context.globalAlpha = clamp(40 / listed[0].relevance.order.length, 0.1, 0.75);
    for (const { relevance } of listed) {
      for (const part of relevance.order) {
        const share = relevance.values[part] / limit;
        const isBeyond = Math.abs(share) > 1.000001;
        beyond += isBeyond;
        const x = clamp(((share + 1) / 2) * width - 0.75, 0, width - 1.5);
        const top = isBeyond ? 0 : 8;
        context.fillRect(x, top, 1.5, height - BAND - top);
      }
    }

    const [low, high] = sides(view);
    const tick = (value, text, word) =>
      element("span", { "data-word": text && word }, value, element("small", {}, text));
    fill(this.ticks, tick(`−${digits(limit)}`, low), tick("0", beyond ? `${count(beyond, "value")} off the scale` : "", "beyond"),
      tick(`+${digits(limit)}`, high));
    this.canvas.setAttribute("aria-label", `Color scale from −${digits(limit)}, blue, ${low}, ` +
      `to +${digits(limit)}, orange, ${high}; ${count(beyond, "value")} off the scale`);
  }
}

// What the two ends of the scale mean.
function sides({ example, state }) {
  if (state.values.view === "pair" || state.span) return ["against it", "for it"];
  if (example.answer(state.pick).p === null) return ["lowers it", "raises it"];
  const answer = name(example.answer(state.pick).text);
  const { n } = state.values;
  if (n < 0) return [`against “${answer}”`, `for “${answer}”`];
  const other = name(example.outputs[state.pick.output].answers[n].text);
  return [`for “${other}”`, `for “${answer}”`];
}
