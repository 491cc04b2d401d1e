// The ways to the answer: sentences of the prompt, the reasoning and the answer as boxes, and ribbons
// from what was read to what was written from it.
import { element, fill, range, svg } from "./dom.js";
import { percent, abridged, token, visible } from "./format.js";
import { TOGETHER } from "./answer_trace.js";

const MOST_BOXES = 5; // per column
const LEAST_BOX = 0.01; // of a hop
const MOST_RIBBONS = 18;
const LEAST_RIBBON = 0.015;
const WIDEST_RIBBON = 18; // pixels
const NARROW_PICTURE = 680;
const PAPER = 640; // pixels across a sheet
const BOX_LETTERS = 96;

export class AnswerPicture {
  constructor(page) {
    this.page = page;
    this.drawing = svg("svg", { "aria-hidden": "true" });
    this.columns = element("div", { class: "columns" });
    this.node = element("div", { class: "ways-picture", role: "group",
      "aria-label": "Ways from the prompt to the answer",
      onpointerover: ({ target }) => this.#light(target), onpointerleave: () => this.#light(null),
      onfocusin: ({ target }) => this.#light(target), onfocusout: () => this.#light(null),
    }, this.drawing, this.columns);
  }

  update(view) {
    const { trace } = view;
    Object.assign(this, { view, trace, unit: trace.unit, hop: view.state.values.hop });
    const focused = document.activeElement?.closest?.(".ways-picture") && document.activeElement.part;
    this.node.style.width = this.page.isPrinting ? `${PAPER}px` : "";
    this.links = this.#links();
    this.shares = trace.partsOf(this.hop);
    this.written = this.#written();
    this.boxes = new Map();
    fill(this.columns, trace.shares(this.hop).map((region) => this.#column(region)));
    this.node.classList.toggle("stacked", this.page.isPrinting || this.node.clientWidth < NARROW_PICTURE);
    this.#draw();
    if (typeof focused === "number") this.boxes.get(focused)?.focus({ preventScroll: true });
  }

  // What goes from part to part, of each hop: the share of the hop, and of all.
  #links() {
    const links = this.trace.hops.flatMap(({ ways }, hop) => [...ways].flatMap(([to, parts]) =>
      [...parts.entries()].filter(([from, value]) => value && from !== to).map(([from, value]) => {
        const share = Math.abs(value) / (this.trace.totals[hop] || 1);
        return { hop, from, to, value, share, reach: share * this.trace.reached[hop] };
      })));
    return links.filter(({ share }) => share >= LEAST_RIBBON / 4);
  }

  // The parts that a hop explains: those of the span, or the own words that the hop before reached.
  #written() {
    const hop = this.hop === "all" ? 0 : Number(this.hop);
    const { ways } = this.trace.hops[hop];
    if (!ways.has(TOGETHER)) return new Set(ways.keys());
    return hop === 0 ? this.#picked() : new Set(this.#own(this.trace.hops[hop - 1].row));
  }

  #picked() {
    const [first, end] = this.view.state.span;
    return new Set(range(this.unit.of[end - 1] - this.unit.of[first] + 1).map((k) => this.unit.of[first] + k));
  }

  #own(row) {
    const start = this.trace.prompt;
    return range(row.length - start).filter((k) => row[start + k]).map((k) => this.unit.of[start + k]);
  }

  #column({ name, first, end, share }) {
    const { unit } = this;
    const [from, to] = [unit.of[first], unit.of[end - 1]];
    const parts = range(to - from + 1).map((k) => from + k);
    const weight = this.#weights();
    const kept = parts.filter((part) => weight[part] >= LEAST_BOX)
      .sort((a, b) => weight[b] - weight[a]).slice(0, MOST_BOXES).sort((a, b) => a - b);
    const rest = parts.filter((part) => !kept.includes(part));
    const left = rest.reduce((sum, part) => sum + Math.abs(this.shares[part]), 0);
    const more = rest.length > 0 && element("li", { class: "quiet" },
      `${kept.length ? "and " : ""}${rest.length.toLocaleString("en")} more${left < 0.0005 ? "" : ` · ${percent(left)}`}`);
    return element("section", { class: `column ${name}`, "aria-label": name },
      element("h3", { class: "label" }, name, " ", element("b", {}, share ? percent(share) : "")),
      element("ol", {}, kept.map((part) => element("li", {}, this.#box(part))), more));
  }

  // How much a part matters at any hop, or is explained.
  #weights() {
    if (this.weighed?.trace === this.trace) return this.weighed.weights;
    const weights = new Float64Array(this.unit.count);
    for (const { from, to, reach } of this.links) {
      weights[from] += reach;
      if (to >= 0) weights[to] += reach;
    }
    if (this.trace.hops[0].ways.has(TOGETHER)) for (const part of this.#picked()) weights[part] += LEAST_BOX;
    this.weighed = { trace: this.trace, weights };
    return weights;
  }

  #box(part) {
    const { view: { example }, page, trace, unit } = this;
    const share = this.shares[part];
    const most = Math.max(...this.shares.map(Math.abs)) || 1;
    const swatch = Math.abs(share) < 0.0005 ? null : page.colors.of(share, most * 1.5);
    const text = unit.names[part] || example.partText(unit, part);
    const box = element("button", { type: "button", class: this.written.has(part) ? "box written" : "box",
      "data-tip": this.#told(part, share), onclick: () => page.answer.press(unit.bounds[part], part) },
    token(abridged(visible(text), BOX_LETTERS)), element("small", {}, share ? percent(Math.abs(share)) : ""));
    if (swatch) Object.assign(box.style, { backgroundColor: swatch.css, color: swatch.text });
    box.part = part;
    this.boxes.set(part, box);
    return box;
  }

  // The numbers of a part in words: what it gives, through what, and what it is made of.
  #told(part, share) {
    const { trace, unit, view: { example } } = this;
    const say = (other) => (other === TOGETHER ? "all of it" : `“${abridged(example.partText(unit, other), 40)}”`);
    const active = this.links.filter(({ hop }) => this.#isActive(hop)).sort((a, b) => b.share - a.share);
    const size = (link) => percent(this.hop === "all" ? link.reach : link.share);
    const list = (links, end) => links.slice(0, 3).map((link) => `${size(link)} ${say(link[end])}`).join(", ");
    const [given, read] = ["from", "to"].map((end) => active.filter((link) => link[end] === part));
    const what = this.hop === "0" ? "what is explained" : this.hop === "all" ? "the whole" : "this step";
    const isOwn = unit.bounds[part][0] >= trace.prompt;
    return [
      share ? `${percent(Math.abs(share))} of ${what}${share < 0 ? ", against it" : ""}.` : "Nothing of this step.",
      given.length > 0 && `Goes into: ${list(given, "to")}.`,
      read.length > 0 && `Written from: ${list(read, "from")}.`,
      isOwn ? "Click to explain it." : "Click to find it in the text.",
    ].filter(Boolean).join("\n");
  }

  #isActive(hop) {
    return this.hop === "all" || Number(this.hop) === hop;
  }

  // Ribbons.

  #draw() {
    const frame = this.node.getBoundingClientRect();
    this.drawing.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
    const place = (node) => {
      const { left, right, top, bottom } = node.getBoundingClientRect();
      return { left: left - frame.left, right: right - frame.left, top: top - frame.top, bottom: bottom - frame.top };
    };
    const places = new Map([...this.boxes].map(([part, box]) => [part, place(box)]));
    const ends = new Map();
    const ribbons = this.#ribbons(places);
    for (const ribbon of ribbons) {
      for (const end of ["from", "to"]) {
        const key = `${end}${ribbon.isAside}${ribbon[end]}${ribbon.to === TOGETHER ? ribbon.hop : ""}`;
        ends.set(key, [...(ends.get(key) ?? []), { ribbon, end }]);
      }
    }
    // Ribbons that meet at a box lie one below the other.
    for (const list of ends.values()) {
      const other = ({ ribbon, end }) => middle(end === "from" ? ribbon.target : ribbon.source);
      list.sort((a, b) => other(a) - other(b));
      let at = -list.reduce((sum, { ribbon }) => sum + ribbon.width + 1, 0) / 2;
      for (const { ribbon, end } of list) {
        ribbon[end === "from" ? "leaves" : "arrives"] = at + (ribbon.width + 1) / 2;
        at += ribbon.width + 1;
      }
    }
    fill(this.drawing, ribbons.toReversed().map((ribbon) => this.#ribbon(ribbon)));
  }

  #ribbons(places) {
    const isStacked = this.node.classList.contains("stacked");
    const size = (link) => (this.hop === "all" ? link.reach : link.share);
    const found = this.links
      .map((link) => ({ ...link, isActive: this.#isActive(link.hop), source: places.get(link.from),
        target: link.to === TOGETHER ? this.#together(link.hop, places) : places.get(link.to) }))
      .filter((link) => link.source && link.target)
      .filter((link) => (link.isActive ? size(link) : link.reach) >= LEAST_RIBBON)
      .sort((a, b) => b.isActive - a.isActive || b.reach - a.reach).slice(0, MOST_RIBBONS);
    const most = Math.max(...found.filter(({ isActive }) => isActive).map(size)) || 1;
    return found.map((link) => ({ ...link,
      isAside: isStacked || Math.abs(link.source.left - link.target.left) < 2, isStacked,
      width: link.isActive ? Math.max(1.5, (WIDEST_RIBBON * size(link)) / most) : Math.max(1, WIDEST_RIBBON * link.reach) }));
  }

  // All boxes that one row explains.
  #together(hop, places) {
    const parts = hop === 0 ? [...this.#picked()] : this.#own(this.trace.hops[hop - 1].row);
    const held = [...new Set(parts)].map((part) => places.get(part)).filter(Boolean);
    if (!held.length) return null;
    const [left, right] = [Math.max(...held.map((one) => one.left)), Math.max(...held.map((one) => one.right))];
    return { left, right, top: Math.min(...held.map((one) => one.top)), bottom: Math.max(...held.map((one) => one.bottom)) };
  }

  #ribbon({ from, to, value, width, isActive, isAside, isStacked, source, target, leaves, arrives }) {
    const [y1, y2] = [middle(source) + leaves, middle(target) + arrives];
    const tip = Math.max(4, width * 0.5 + 2.5);
    let line, head;
    if (isAside) {
      const side = isStacked ? -1 : 1;
      const [x1, x2] = isStacked ? [source.left, target.left] : [source.right, target.right];
      const out = side * Math.min(isStacked ? 40 : 54, 14 + Math.abs(y2 - y1) * 0.22);
      const end = x2 + side * tip;
      line = `M${x1} ${y1}C${x1 + out} ${y1} ${end + out} ${y2} ${end} ${y2}`;
      head = arrow(x2, y2, tip, -side);
    } else {
      const [x1, x2] = [source.right, target.left];
      const end = x2 - tip;
      const bend = Math.min(90, (end - x1) / 2);
      line = `M${x1} ${y1}C${x1 + bend} ${y1} ${end - bend} ${y2} ${end} ${y2}`;
      head = arrow(x2, y2, tip, 1);
    }
    const color = isActive ? this.page.colors.of(Math.sign(value), 1.6).css : this.page.colors.line;
    const group = svg("g", { class: isActive ? "ribbon active" : "ribbon" },
      svg("path", { d: line, fill: "none", stroke: color, "stroke-width": width }), svg("path", { d: head, fill: color }));
    Object.assign(group, { from, to });
    return group;
  }

  // The ribbons of the box that is pointed at.
  #light(target) {
    const part = target?.closest?.(".box")?.part;
    this.node.classList.toggle("lit", part !== undefined);
    for (const group of this.drawing.children) {
      group.classList.toggle("on", part !== undefined && (group.from === part || group.to === part));
    }
  }
}

const middle = ({ top, bottom }) => (top + bottom) / 2;
const arrow = (x, y, size, way) => `M${x} ${y}l${-way * size} ${-size}v${2 * size}z`;
