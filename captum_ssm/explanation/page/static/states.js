// The page of a state report: how long each layer keeps what is written, how full its state is along
// a text, and which tokens fill it.
import { barLine, ofWhole, styled, whisker } from "./bars.js";
import { Choice } from "./controls.js";
import { element, fill, hasModifier, svg, tableParts } from "./dom.js";
import { count, digits, name, percent, visible } from "./format.js";
import { hostIsDark, themeButton, watchHost } from "./host.js";
import { Tip } from "./tip.js";

const STRIP = { width: 420, height: 22, edge: 6 };
const PLOT = { width: 300, height: 150, left: 34, bottom: 20, top: 6, right: 8 };
const MEASURES = {
  used: ["Rank in use", "Participation ratio of the state’s squared singular values, over the largest possible rank."],
  change: ["Change by a token", "Norm of the last token’s change of the state, over the norm of the state."],
  share: ["Share of later states", "What a token wrote and is left of it in later states; 1 is an even share."],
  norm: ["Norm of the state", "A norm that keeps growing with the text means that little is forgotten."],
};

export function openStates(parent, data) {
  const page = new StatesPage(data);
  parent.append(page.root);
  page.start();
}

class StatesPage {
  constructor(data) {
    Object.assign(this, { data, chosen: 0 });
    this.themeButton = themeButton({ "data-tip": "Dark or light (d)" }, () => this.#setTheme(this.root.dataset.theme !== "dark"));
    this.layers = new Choice("view", (layer) => this.#choose(Number(layer)), { caption: null, label: "Layer" });
    this.table = element("div");
    this.plots = element("div", { class: "plots" });
    this.sinks = element("div");
    this.root = element("div", { class: "captum-page whole report states", lang: "en" }, element("main", {},
      element("header", { class: "top" }, element("h1", {}, visible(data.title)),
        element("span", { class: "quiet" }, count(data.inputs, "text")), element("div", { class: "tools" }, this.themeButton)),
      element("section", { class: "ask" }, element("h2", { class: "question" }, this.#sentence()),
        element("p", { class: "quiet" }, "Half-life: how many tokens pass until half of what was written is left. A write that its text is too short for counts as at least that long.")),
      element("section", {}, element("h2", {}, "How long a write is kept"), element("div", { class: "scroller" }, this.table)),
      element("section", {}, element("h2", {}, "Along the text"), this.plots,
        element("p", { class: "quiet" }, "Mean over texts and heads, by position from 1. The chosen layer is the thick line.")),
      element("section", {}, element("h2", {}, "Tokens that fill the state"), element("div", { class: "line" }, this.layers.node), this.sinks,
        element("p", { class: "quiet" }, "Share of later states over an even share, at the head where it is largest, with its 95% interval over texts; at the right, in how many texts. Tokens of one text alone come last."))));
  }

  start() {
    const { signal } = new AbortController();
    this.tip = new Tip(this.root, signal);
    this.root.append(this.tip.node);
    watchHost(() => this.#setTheme(hostIsDark()), signal);
    document.addEventListener("keydown", (event) => {
      if (event.key === "d" && !hasModifier(event)) this.themeButton.click();
    });
    this.#setTheme(hostIsDark());
    this.#choose(0);
  }

  #setTheme(isDark) {
    this.root.dataset.theme = isDark ? "dark" : "light";
    this.themeButton.setAttribute("aria-pressed", String(isDark));
  }

  #choose(layer) {
    const { data } = this;
    this.chosen = layer;
    this.layers.show(data.layers.map((layer, k) => ({ value: k, content: short(layer), title: visible(layer.name) })), layer);
    fill(this.table, this.#lives());
    fill(this.plots, Object.entries(MEASURES).filter(([key]) => data.layers.some(({ lines }) => lines[key]?.length)).map(([key, [title, told]]) =>
      element("figure", { "data-tip": told }, element("figcaption", {}, title), this.#plot(key))));
    fill(this.sinks, this.#tokens(data.layers[layer].sinks));
  }

  #sentence() {
    const lives = this.data.layers.map((layer) => [layer, medianOf(layer)]).sort((a, b) => a[1] - b[1]);
    const told = ([layer, life]) => (life === Infinity
      ? [`in ${short(layer)} more than half of it `, element("b", {}, "outlives the text")]
      : [`in ${short(layer)} half of it is gone after `, element("b", {}, inTokens(life))]);
    const ends = lives.length > 1 ? [told(lives[0]), "; ", told(lives.at(-1))] : told(lives[0]);
    return ["What is written fades: ", ends, "."];
  }

  #lives() {
    const all = this.data.layers.flatMap(({ lives }) => lives.map(({ life }) => life).filter((life) => life !== null));
    const [low, high] = [Math.min(...all, 1), Math.max(...all, 2)].map(Math.log2);
    const { width, height, edge } = STRIP;
    const x = (life) => edge + ((width - 2 * edge) * (Math.log2(life) - low)) / (high - low || 1);
    const heads = ["layer", `${digits(2 ** low)} to ${digits(2 ** high)} tokens, a dot per channel or head`, "median", "longer than the texts"];
    const rows = this.data.layers.map((layer, k) => {
      const known = layer.lives.filter(({ life }) => life !== null);
      const dots = known.map(({ head, life }) => svg("circle", { cx: x(life), cy: height / 2 + ((head % 5) - 2) * 2, r: 3 }));
      return element("tr", { class: k === this.chosen && "chosen" },
        element("td", {}, element("button", { type: "button", class: "link", onclick: () => this.#choose(k) }, visible(layer.name))),
        element("td", {}, svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "strip-of-lives", role: "img",
          "aria-label": `${count(known.length, "half-life").replace("lifes", "lives")} that end in the texts` }, dots)),
        element("td", { class: "number" }, inTokens(medianOf(layer))),
        element("td", { class: "number" }, percent(layer.outlives)));
    });
    return element("table", { class: "slices" }, tableParts(heads, rows));
  }

  #plot(measure) {
    const { width, height, left, bottom, top, right } = PLOT;
    const lines = this.data.layers.map(({ lines: held }) => held[measure] ?? []);
    const points = lines.flat();
    const last = Math.log2(Math.max(...points.map(([start]) => start + 1), 2));
    const most = Math.max(...points.map(([, mean]) => mean), 1e-9);
    const x = (start) => left + ((width - left - right) * Math.log2(start + 1)) / last;
    const y = (mean) => height - bottom - ((height - bottom - top) * Math.max(mean, 0)) / most;
    const path = (line) => line.map(([start, mean], k) => `${k ? "L" : "M"}${x(start).toFixed(1)} ${y(mean).toFixed(1)}`).join("");
    const told = this.data.layers.map(({ name: title }, k) => lines[k].length > 0
      && `${title}: ${digits(lines[k][0][1])} at first, ${digits(lines[k].at(-1)[1])} at the end`).filter(Boolean).join("; ");
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": told },
      svg("path", { class: "axis", d: `M${left} ${top}V${height - bottom}H${width - right}` }),
      svg("text", { x: left - 4, y: top + 8, "text-anchor": "end" }, digits(most)),
      svg("text", { x: left - 4, y: height - bottom, "text-anchor": "end" }, "0"),
      svg("text", { x: left, y: height - 6 }, "1"),
      svg("text", { x: width - right, y: height - 6, "text-anchor": "end" }, digits(2 ** last)),
      lines.map((line, k) => svg("path", { class: k === this.chosen ? "line-of chosen" : "line-of", d: path(line) })));
  }

  #tokens(entries) {
    const top = Math.max(...entries.map(({ high, share }) => high ?? share), 1e-9);
    return element("ol", { class: "shares" }, entries.map(({ text, share, low, high, inputs, head }) => {
      const marks = [styled("i", { width: ofWhole(share, top) }), low !== null && whisker(Math.max(low, 0), high, top)];
      const interval = low === null ? "in one text" : `95% interval ${digits(low)} to ${digits(high)}, in ${count(inputs, "text")}`;
      return barLine(`${digits(share)} times an even share at head ${head}, ${interval}`,
        element("bdi", { class: "token" }, name(text)), marks, digits(share), inputs.toLocaleString("en"));
    }));
  }
}

// The median over a layer's channels or heads, in which those that outlive their texts are longest.
function medianOf({ lives }) {
  const sorted = lives.map(({ life }) => life ?? Infinity).sort((a, b) => a - b);
  return sorted[Math.floor((sorted.length - 1) / 2)];
}

// The number of a layer whose name has one, such as backbone.layers.3.mixer.
function short({ name: title }) {
  const numbers = title.match(/(?<=\.)\d+(?=\.|$)/g);
  return numbers?.length === 1 ? `layer ${numbers[0]}` : visible(title);
}

const inTokens = (life) => (life === Infinity ? "longer than the texts" : `${digits(life)} ${life === 1 ? "token" : "tokens"}`);
