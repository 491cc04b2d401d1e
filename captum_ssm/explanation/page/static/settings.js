// The row of controls that say how relevance is shown. What would change nothing is left out.
import { Choice, Slider, Toggle } from "./controls.js";
import { element } from "./dom.js";
import { visible } from "./format.js";
import { VIEWS } from "./state.js";

const UNITS = {
  token: "Token", word: "Word", sentence: "Sentence", line: "Line", turn: "Turn", span: "Part", patch: "Patch",
  modality: "Modality", pixel: "Pixel", value: "Value", step: "Time step", feature: "Feature", frame: "Frame",
};
const OPACITIES = [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100];

export class Settings {
  constructor(page) {
    this.page = page;
    const set = (key) => (value) => page.set({ [key]: value });
    this.method = new Choice("method", set("m"));
    this.views = new Choice("view", set("view"));
    this.units = new Choice("units", set("u"));
    this.own = new Toggle("own", (isHidden) => page.set({ own: page.state.writtenOwn(!isHidden) }));
    this.last = new Toggle("last", (isHidden) => page.set({ last: isHidden ? 0 : 1 }));
    this.template = new Toggle("template", (isHidden) => page.set({ template: isHidden ? 0 : 1 }));
    this.hiding = element("div", { class: "field" }, element("span", { class: "label" }, "Hide"),
      this.own.node, this.last.node, this.template.node);
    this.grid = new Toggle("grid", (isShown) => page.set({ grid: isShown ? 1 : 0 }));
    this.gray = new Toggle("picture", (isGray) => page.set({ gray: isGray ? 1 : 0 }));
    this.opacity = new Slider("opacity", OPACITIES, (value) => `${value}%`, set("opacity"));
    this.node = element("section", { class: "controls line" }, this.method.node, this.views.node,
      this.units.node, this.hiding, this.opacity.node, this.gray.node, this.grid.node);
  }

  update(state) {
    const { example, values, data } = state;
    this.method.node.hidden = data.methods.length < 2;
    this.method.show(data.methods.map((each) => ({
      value: each.name, content: visible(each.title), title: visible(each.note),
    })), values.m);
    const views = state.views;
    const pair = example.outputs.length > 1 ? VIEWS.pair : "Two answers";
    this.views.node.hidden = views.length < 2;
    this.views.show(views.map((value) =>
      ({ value, content: value === "pair" ? pair : VIEWS[value] })), values.view);
    this.units.node.hidden = example.unitNames.length < 2;
    this.units.show(example.unitNames.map((value) =>
      ({ value, content: UNITS[value] ?? visible(value) })), values.u);

    const positions = example.outputs.map(({ position }) => position);
    // An image, and an answer that all tokens are read for, has no single token that is read.
    this.own.node.hidden = (state.span && !example.whole.canFollow(state.span)) || example.outputs.every(({ position, readAt }) => position === null && readAt === null);
    this.own.show(!state.showsOwn);
    // Where all outputs are read at the prompt's last token, that is the one which reads itself.
    this.last.node.hidden = !example.prompt || example.isLabeled || positions.includes(null) || state.span !== null ||
      positions.every((position) => position === example.prompt - 1);
    this.last.show(!values.last);
    this.template.node.hidden = !example.turns;
    this.template.show(!values.template);
    this.hiding.hidden = [this.own, this.last, this.template].every(({ node }) => node.hidden);
    const pictures = example.pictures.filter(({ pixels, isGrid }) => pixels && isGrid);
    const hasPicture = example.isImage || pictures.length > 0;
    this.opacity.node.hidden = !hasPicture;
    this.opacity.show(values.opacity);
    this.gray.node.hidden = !hasPicture;
    this.gray.show(values.gray);
    this.grid.node.hidden = !example.grid && !pictures.length;
    this.grid.show(values.grid);
  }
}
