// What arrives at a node and what leaves it, or what an edge is made of: a table that adds up.
import { sidedBar } from "./bars.js";
import { added, element, fill } from "./dom.js";
import { abs, bySize, max } from "./flow_graph.js";
import { PARTS, flowTitle, layersNamed, shareOf } from "./flow_words.js";
import { quoted, signed, visible } from "./format.js";

const MOST_ROWS = 7; // rows of edges
const LEAST_PART = 5e-4; // of the node, that other rows need

// A token in quotes, with its position.
const numberedToken = ({ tokens }, { token }) => [quoted(tokens[token]), element("small", {}, ` ${token}`)];

export class FlowLedger {
  constructor(page) {
    this.page = page;
    this.node = element("section", { class: "ledger", "aria-label": "What arrives and leaves" });
  }

  update(graph, thing) {
    const isEdge = Boolean(thing.source);
    const kind = !isEdge ? "node" : thing.kind === "stay" ? "kept" : "edge";
    fill(this.node,
      element("h3", { class: "label", "data-word": kind }, { node: "Node", kept: "What stays", edge: "Edge" }[kind]),
      element("p", { class: "title" }, flowTitle(graph, thing)),
      element("p", {}, element("b", {}, signed(thing.value)),
        ` · ${shareOf(thing.value, graph.score.value)} of the score ${signed(graph.score.value)}`),
      isEdge ? this.#edge(graph, thing) : this.#sides(graph, thing));
  }

  #edge(graph, thing) {
    const { source, target, rank, parts, heads, value, kind, layer } = thing;
    const part = (node, words) => `${shareOf(value, node.value)} of the ${signed(node.value)} that ${words}`;
    const ranked = rank < graph.ranked ? `, number ${rank + 1} by size` : "";
    const known = parts.map((each, k) => [PARTS[k], each]).filter(([, each]) => each !== null);
    return [
      element("p", { class: "quiet" }, part(source, "leaves it"), "; ", part(target, "arrives"), ranked, "."),
      kind !== "stay" && element("p", { class: "quiet" }, visible(graph.layers[layer].name)),
      known.length > 0 && this.#table("Made of", known, value),
      heads.length > 1 && this.#table("By head", heads.map((each, k) => [`head ${k}`, each]), added(heads)),
    ];
  }

  #sides(graph, node) {
    const of = (end) => numberedToken(graph, end);
    const side = (links, isOut, rest, bias, shifts = []) => {
      if (!links.length) return [];
      const sorted = [...links].sort(bySize);
      const more = sorted.splice(MOST_ROWS);
      const amount = (link) => (isOut ? link.low ?? link.value : link.value);
      // Over folded layers, biases are in the rest.
      const known = links.some(({ layer, end }) => end - layer > 1) ? 0 : bias;
      const rows = sorted.map((link) => [this.#named(graph, link, isOut), amount(link)]);
      const moved = shifts.map(({ source, target, value }) => source === node
        ? [["to ", of(target), " by the token shift"], value] : [["given by ", of(source), ", token shift"], -value]);
      const rests = [[`${more.length} smaller edges`, added(more, amount)], ...moved, ["biases", known],
        ["not shown", rest - known - added(moved, ([, value]) => value)]];
      return [...rows, ...rests.filter(([, value]) => abs(value) > LEAST_PART * abs(node.value)).map((row) => [...row, "rest"])];
    };
    return [
      this.#table("Arrives, from below", side(node.in, false, node.inRest, node.arrived), node.value),
      this.#table("Leaves, upwards", side(node.out, true, node.outRest, node.left, node.shifts), node.value),
    ];
  }

  #named(graph, { kind, layer, end, source, target }, isOut) {
    if (kind === "stay") return `stays, ${layersNamed(layer, end - 1)}`;
    return [isOut ? "to " : "from ", numberedToken(graph, isOut ? target : source)];
  }

  #table(caption, rows, total) {
    if (!rows.length) return null;
    const most = max(1e-9, ...rows.map(([, value]) => abs(value)));
    return element("table", {}, element("caption", {}, caption), element("tbody", {},
      rows.map(([label, value, kind]) => element("tr", { class: kind },
        element("th", { scope: "row" }, label), element("td", { class: "bar-cell" }, sidedBar(value / most, this.page.colors)),
        element("td", {}, signed(value)))),
      element("tr", { class: "total" }, element("th", { scope: "row" }, "together"), element("td"),
        element("td", {}, signed(total)))));
  }
}
