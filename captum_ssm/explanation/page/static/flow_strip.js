// All tokens in their order, below the columns of those that carry flow; a click goes there.
import { fill, svg } from "./dom.js";
import { abs, max, spot } from "./flow_graph.js";

const [STRIP_TOP, STRIP_TALL] = [20, 18];

export class FlowStrip {
  constructor(page, picture) {
    Object.assign(this, { page, picture });
    this.node = svg("svg", { class: "strip", role: "img", "data-word": "strip", onclick: (event) => this.#go(event) });
    picture.scroller.addEventListener("scroll", () => this.draw());
  }

  draw() {
    const { graph, view, layout, path, gutterWidth: gutter, scroller, isCut } = this.picture;
    const { tokens, relevance } = graph;
    const [room, left, colors] = [scroller.clientWidth, scroller.scrollLeft, this.page.colors];
    const cell = room / tokens.length;
    const most = max(1e-9, ...relevance.map(abs));
    const column = (token) => gutter + layout.x.get(token) - left;
    const x = (token) => gutter + (token + 0.5) * cell;
    const seen = view.tokens.filter((token) => column(token) >= gutter && column(token) <= gutter + room);
    const isStrong = (token) => token === path?.start || token === graph.at;
    this.node.setAttribute("width", gutter + room);
    this.node.setAttribute("aria-label", `All ${tokens.length} tokens, colored by the relevance of the input`);
    fill(this.node,
      svg("text", { x: gutter - 12, y: 33, "text-anchor": "end" }, gutter > 60 ? `${tokens.length} tokens` : tokens.length),
      seen.map((token) => svg("path", { class: isStrong(token) ? "lead strong" : "lead",
        d: `M${column(token)} 0C${column(token)} 13 ${x(token)} 7 ${x(token)} ${STRIP_TOP}` })),
      svg("rect", { class: "ground", x: gutter, y: STRIP_TOP, width: room, height: STRIP_TALL }),
      relevance.map((value, token) => svg("rect", { x: gutter + token * cell, y: STRIP_TOP, height: STRIP_TALL,
        width: max(0.5, cell - (cell > 5 ? 1 : 0)), fill: colors.of(Math.sign(value) * Math.sqrt(abs(value) / most), 1).css })),
      isCut && seen.length > 0 && svg("rect", { class: "window", x: gutter + seen[0] * cell, y: STRIP_TOP - 1.5, rx: 3,
        width: (seen.at(-1) - seen[0] + 1) * cell, height: STRIP_TALL + 3 }),
      svg("text", { x: gutter, y: 50 }, 0), svg("text", { x: gutter + room, y: 50, "text-anchor": "end" }, tokens.length - 1));
  }

  // The column nearest to the token that is clicked.
  #go({ clientX }) {
    const { graph, view, scroller } = this.picture;
    const { left } = scroller.getBoundingClientRect();
    const token = ((clientX - left) / scroller.clientWidth) * graph.tokens.length - 0.5;
    const near = view.tokens.reduce((a, b) => (abs(b - token) < abs(a - token) ? b : a));
    this.picture.focus(spot(0, near));
  }
}
