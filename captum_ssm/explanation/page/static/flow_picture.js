// The drawing of a circuit: bands of layers, columns of tokens, edges, uprights, and the path in ink.
import { clamp, element, fill, svg } from "./dom.js";
import { abs, bySize, largestHead, max, min, spot } from "./flow_graph.js";
import { FlowLayout, course, numberPoint, outline, strands } from "./flow_layout.js";
import { clipped, flowAloud, verdictOf } from "./flow_words.js";
import { signed, visible } from "./format.js";

const NAME_SIGNS = 14; // letters of a token's name
const SLIM_PLOT = 620; // pixels: below, the names of layers are numbers
const NOTCHED_PART = 0.25; // of what stays, the MLP's part from which on it is marked

export class FlowPicture {
  constructor(page) {
    this.page = page;
    this.gutter = svg("svg", { class: "gutter", "aria-hidden": "true" });
    this.picture = svg("svg", { class: "circuit-picture", role: "group" });
    this.scroller = element("div", { class: "plot-scroller" }, this.picture);
    this.node = element("div", { class: "circuit-plot" }, this.gutter, this.scroller);
    this.ruler = element("canvas").getContext("2d");
  }

  // Whether there is more of the drawing than has room.
  get isCut() {
    return this.layout.width > this.scroller.clientWidth + 1;
  }

  get gutterWidth() {
    return Number(this.gutter.getAttribute("width"));
  }

  draw(drawing) {
    Object.assign(this, drawing);
    const { graph, view, node } = this;
    const isSlim = node.clientWidth < SLIM_PLOT;
    const gutter = (isSlim ? 34 : 96) + (graph.isDeep ? 22 : 0);
    this.layout = new FlowLayout(graph, view, max(180, node.clientWidth - gutter), (text) => this.#measure(text));
    const { layout } = this;
    for (const [part, width] of [[this.gutter, gutter], [this.picture, layout.width]]) {
      part.setAttribute("width", width);
      part.setAttribute("height", layout.height);
    }
    const line = this.path ? graph.along(this.path, view).filter(({ isShown }) => isShown) : [];
    fill(this.picture, this.#fades(), this.#ground(),
      view.links.filter(({ kind }) => kind === "stay").map((link) => this.#upright(link)),
      view.links.filter(({ kind, isShown }) => kind !== "stay" && isShown).sort(bySize).map((link) => this.#ribbon(link)),
      [...view.nodes.values()].map((each) => this.#bar(each)),
      this.#line(line), line.map((link, n) => this.#number(link, line[n - 1])), this.#answer(line),
      view.tokens.map((token) => this.#name(token)));
    this.picture.setAttribute("aria-label", `What flows to “${clipped(graph.answer)}”, layers from bottom to top`);
    this.picture.querySelector(`.node[data-id="${view.output.id}"]`).setAttribute("tabindex", 0);
    this.#layers(gutter, isSlim);
  }

  find(id) {
    return this.view.nodes.get(id) ?? this.view.links.find((link) => link.id === id && link.isShown);
  }

  // The rectangle that a node or an edge is drawn in, for the tooltip.
  anchor(id) {
    return this.picture.querySelector(`.node[data-id="${id}"] .core, .link[data-id="${id}"] path`)?.getBoundingClientRect();
  }

  mark(id) {
    for (const node of this.picture.querySelectorAll(".pointed")) node.classList.remove("pointed");
    for (const node of id ? this.picture.querySelectorAll(`[data-id="${id}"]`) : []) node.classList.add("pointed");
  }

  focus(id) {
    const node = this.picture.querySelector(`.node[data-id="${id}"], .link[data-id="${id}"]`);
    if (!node) return;
    this.picture.querySelector("[tabindex='0']")?.setAttribute("tabindex", -1);
    node.setAttribute("tabindex", 0);
    node.focus();
  }

  // Only what flows through one node or edge.
  isolate(id) {
    const chosen = this.find(id);
    this.picture.classList.toggle("isolated", Boolean(chosen));
    if (!chosen) return;
    const on = new Set([chosen.id]);
    const spread = (node, side, end) => {
      on.add(node.id);
      for (const link of node[side]) {
        if (!link.isShown || on.has(link.id)) continue;
        on.add(link.id);
        spread(link[end], side, end);
      }
    };
    spread(chosen.source ?? chosen, "in", "source");
    spread(chosen.target ?? chosen, "out", "target");
    for (const node of this.picture.querySelectorAll("[data-id]")) {
      const isChosen = node.dataset.id === chosen.id;
      node.classList.toggle("on", on.has(node.dataset.id) || node.classList.contains("answer"));
      node.classList.toggle("chosen", isChosen);
      if (isChosen && node.role === "button") node.setAttribute("aria-pressed", "true");
    }
  }

  #measure(text) {
    this.ruler.font = `600 16px ${this.page.colors.text}`;
    return this.ruler.measureText(clipped(text, NAME_SIGNS)).width;
  }

  #button(thing, kind) {
    return { class: kind, "data-id": thing.id, role: "button", tabindex: -1, "aria-label": flowAloud(this.graph, thing) };
  }

  #color(value, strength) {
    return this.page.colors.of(Math.sign(value) * strength, 1).css;
  }

  // Tone rises with size, too.
  #tone(link) {
    return this.#color(link.value, 0.42 + 0.36 * Math.sqrt(abs(link.value) / this.layout.most));
  }

  #fades() {
    const fade = (side, end) => svg("linearGradient", { id: `flow-${side}-${end}`, x2: 0,
      y1: end === "up" ? 1 : 0, y2: end === "up" ? 0 : 1 },
    [1, 0].map((opacity) => svg("stop", { offset: 1 - opacity, "stop-opacity": opacity,
      "stop-color": this.#color(side === "for" ? 1 : -1, 0.55) })));
    return svg("defs", {}, ["for", "against"].map((side) => [fade(side, "up"), fade(side, "down")]));
  }

  // Bands in which edges jump, lines between layers, and gaps for tokens that are left out.
  #ground() {
    const { graph, view, layout } = this;
    const top = layout.y.get(graph.depth);
    const gap = ({ x, count, from }) => {
      const texts = graph.tokens.slice(from, from + min(count, 60)).map((text) => clipped(text)).join(" ");
      // Steep names pass below the gap before them, where a number would be under their letters.
      const more = layout.isSteep ? "" : layout.gapWidth > 30 ? `${count} more` : layout.gapWidth >= 18 ? count : "";
      const text = (y, content) => svg("text", { x, y: layout.bottom + y, "text-anchor": "middle" }, content);
      return svg("g", { class: "gap", "data-tip": `${count} not shown: ${texts}${count > 60 ? " …" : ""}` },
        svg("line", { x1: x, x2: x, y1: top, y2: layout.bottom }),
        text(layout.isSteep ? 10 : 22, layout.gapWidth >= 18 ? "···" : "·"), text(36, more));
    };
    return [
      layout.bands.filter(({ jumps }) => jumps).map(({ y, height }) =>
        svg("rect", { class: "jumping", y, width: layout.width, height })),
      view.rows.map((stage) => svg("line", { class: "stage-line", x2: layout.width, y1: layout.y.get(stage), y2: layout.y.get(stage) })),
      layout.gaps.map(gap),
    ];
  }

  #ribbon(link) {
    const { values } = this;
    const parts = values.heads && link.heads.length > 1 ? strands(link) : [[0, link.width, null]];
    return svg("g", this.#button(link, `link ${link.kind}${link.jumps ? " jump" : ""}`),
      svg("path", { class: "casing", d: course(link), "stroke-width": link.width + 4 }),
      parts.map(([off, width, value]) => svg("path", { class: "strand", d: course(link, off), "stroke-width": width,
        stroke: value === null ? this.#tone(link) : this.#color(value, 0.72) })),
      link.width < 12 && svg("path", { class: "hit", d: course(link), "stroke-width": 12 }));
  }

  #upright(link) {
    if (!link.isShown) return !this.values.kept && svg("path", { class: "thread", d: course(link) });
    const { x1, y0, y1, width } = link;
    const isNotched = abs(link.parts[3] ?? 0) > NOTCHED_PART * abs(link.value) && width > 3 && y0 - y1 > 30;
    const half = width / 2 + 1;
    return svg("g", this.#button(link, "link stay"),
      svg("path", { class: "body", d: outline(link, (value) => this.layout.thick(value)), fill: this.#tone(link) }),
      isNotched && svg("path", { class: "notch", d: `M${x1 - half} ${y1 + 18}L${x1} ${y1 + 13}L${x1 + half} ${y1 + 18}` }),
      width < 10 && svg("path", { class: "hit", d: course(link), "stroke-width": 10 }));
  }

  // A node, with fading ends for what comes or goes by what is not drawn.
  #bar(node) {
    const { layout, view } = this;
    const height = node.isBusy ? 8 : 2;
    const box = (width, height, more) => svg("rect", { x: node.x - width / 2, y: node.y - height / 2, width, height, ...more });
    const stub = (rest, x, y, end) => abs(rest) * layout.unit > 0.8 && view.isSeen(rest) && svg("rect", { class: "stub", x, y,
      width: abs(rest) * layout.unit, height: 15, fill: `url(#flow-${rest < 0 ? "against" : "for"}-${end})` });
    return [
      stub(node.inRest, node.inStub, node.y + 4, "down"),
      stub(node.outRest, node.outStub, node.y - 19, "up"),
      svg("g", this.#button(node, node.isBusy ? "node" : "node calm"),
        box(max(node.width, 22), node.isBusy ? 22 : 12, { class: "hit" }),
        box(node.width, height, { class: "core", rx: min(2.5, height / 2), fill: this.#color(node.value, 0.84) })),
    ];
  }

  // The path, and a dot where it begins, turns to another token, and ends.
  #line(line) {
    const isTurn = (link, n) => link.kind !== "stay" || line[n - 1]?.kind !== "stay";
    return svg("g", { class: "ink" },
      svg("path", { d: line.map((link, n) => course(link).replace("M", line[n - 1]?.target === link.source ? "L" : "M")).join("") }),
      line.map((link, n) => isTurn(link, n) && svg("circle", { cx: link.x0, cy: link.source.y, r: 3.2 })));
  }

  #number(link, before) {
    const isLong = link.y0 - link.y1 > 40 && (this.layout.isSparse || before?.kind !== "stay");
    if (link.kind === "stay" && !isLong) return null;
    const head = this.values.heads ? largestHead(link).replace(/ of .*/, "").replace(":", "") : "";
    return svg("text", { class: "number", ...numberPoint(link, this.layout.width) }, signed(link.value), head && ` · ${head}`);
  }

  #answer(line) {
    const { graph, view: { output }, layout } = this;
    const stem = line.at(-1)?.target === output ? line.at(-1).x1 : output.x;
    const width = max(30, this.#measure(graph.answer) + 20);
    const left = clamp(stem - width / 2, 0, layout.width - width);
    return svg("g", { class: "name answer", "data-id": output.id },
      svg("line", { x1: stem, x2: stem, y1: 36, y2: output.y + 4 }),
      svg("rect", { x: left, y: 8, width, height: 28, rx: 7 }),
      svg("text", { x: left + width / 2, y: 27.5, class: "token", "text-anchor": "middle" }, clipped(graph.answer, NAME_SIGNS)));
  }

  #name(token) {
    const { graph, layout, path } = this;
    const [x, y, text] = [layout.x.get(token), layout.bottom, clipped(graph.tokens[token], NAME_SIGNS)];
    const isTold = token === path?.start;
    const role = token === graph.at ? "answers" : isTold ? verdictOf(graph, path) : "";
    const line = (dy, kind, content) => svg("text", { x, y: y + dy, class: kind, "text-anchor": "middle" }, content);
    return svg("g", { class: role ? "name strong" : "name", "data-id": spot(0, token) },
      layout.isSteep ? svg("text", { transform: `translate(${x + 5} ${y + 16}) rotate(-58)`, "text-anchor": "end" },
        svg("tspan", { class: "token" }, text), svg("tspan", { class: "index", dx: 4 }, token))
        : [line(28, "token", text), line(44, "index", token), role && line(57, "index role", role)]);
  }

  // Names of the layers; of a deep model also a map of all of them, by how much they move.
  #layers(width, isSlim) {
    const { graph, layout } = this;
    const moved = graph.layers.map(() => 0);
    for (const { layer, value } of graph.reads) moved[layer] += abs(value);
    const most = max(1e-9, ...moved);
    const cell = (layout.bottom - layout.y.get(graph.depth)) / graph.depth;
    const text = (y, content, kind, x = width - 12) => svg("text", { x, y, "text-anchor": "end", class: kind }, content);
    const band = ({ layer, end, y, height, drawn }) => {
      const middle = y + height / 2;
      const numbers = end - layer === 1 ? layer : `${layer}–${end - 1}`;
      const isQuiet = !drawn.length;
      const tick = layout.bottom - ((layer + end) / 2) * cell;
      return [
        text(isQuiet || isSlim ? middle + 4 : middle - 1, isSlim ? numbers : isQuiet ? `${numbers} · quiet` : `Layer ${numbers}`,
          isQuiet ? "quiet" : ""),
        !isQuiet && !isSlim && text(middle + 13, visible(graph.layers[layer].kind), "quiet"),
        graph.isDeep && !isQuiet && svg("path", { class: "lead", d: `M11 ${tick}C22 ${tick} 16 ${middle} ${isSlim ? 24 : 36} ${middle}` }),
      ];
    };
    fill(this.gutter, text(27, isSlim ? "layer" : "answer ↑", "quiet", isSlim ? width - 4 : undefined), !isSlim && text(layout.bottom + 28, "text", "quiet"),
      layout.bands.map(band),
      graph.isDeep && moved.map((sum, layer) => svg("rect", { width: 10, y: layout.bottom - (layer + 1) * cell + 0.5,
        height: max(1, cell - 1), fill: sum ? this.#color(1, 0.25 + (0.75 * sum) / most) : this.page.colors.sunken })));
  }
}
