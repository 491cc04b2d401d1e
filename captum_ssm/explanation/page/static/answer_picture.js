// The ways to the answer: sentences of the prompt, the reasoning and the answer as boxes, and ribbons
// from what was read to what was written from it.
import { added, element, fill, range, svg } from "./dom.js";
import { abridged, percent, token } from "./format.js";
import { TOGETHER } from "./answer_trace.js";

const MOST_BOXES = 5; // per column
const FEWEST_BOXES = 3;
const LEAST_BOX = 0.01; // of what is explained
const MOST_RIBBONS = 18;
const LEAST_RIBBON = 0.015;
const WIDEST_RIBBON = 16; // pixels
const ALL_RIBBONS = 64;
const LANE = 14; // pixels below the reasoning, for the prompt's ribbons that go around it
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
    const focused = document.activeElement?.closest?.(".ways-picture") && document.activeElement.unitPart;
    this.node.style.width = this.page.isPrinting ? `${PAPER}px` : "";
    this.links = this.#links();
    this.shares = trace.partsOf(this.hop);
    this.limit = 1.5 * this.shares.reduce((most, share) => Math.max(most, Math.abs(share)), 1e-9);
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
      [...parts.sizes.entries()].filter(([, size]) => size).map(([from, size]) => {
        const share = size / (this.trace.totals[hop] || 1);
        return { hop, from, to, sign: Math.sign(parts.values[from]), share, reach: share * this.trace.reached[hop] };
      })));
    return links.filter(({ share }) => share >= LEAST_RIBBON / 3);
  }

  // The parts that a hop explains: those of the span, or the own words that the hop before reached.
  #written() {
    const hop = this.hop === "all" ? 0 : Number(this.hop);
    const { ways } = this.trace.hops[hop];
    const least = this.hop === "0" ? 0 : LEAST_BOX * this.trace.totals[hop];
    if (!ways.has(TOGETHER)) return new Set([...ways.keys()].filter((part) => added(ways.get(part).sizes) >= least));
    return new Set(hop === 0 ? this.trace.picked : this.#own(this.trace.hops[hop - 1].row));
  }

  #own(row) {
    const start = this.trace.prompt;
    return range(row.length - start).filter((k) => row[start + k]).map((k) => this.unit.of[start + k]);
  }

  #column({ name, first, end, share }) {
    const { unit } = this;
    const [from, to] = [unit.of[first], unit.of[end - 1]];
    const parts = range(to - from + 1).map((k) => from + k);
    const weight = this.trace.weights;
    const kept = parts.filter((part) => weight[part]).sort((a, b) => weight[b] - weight[a])
      .filter((part, rank) => rank < FEWEST_BOXES || (rank < MOST_BOXES && weight[part] >= LEAST_BOX)).sort((a, b) => a - b);
    const rest = parts.filter((part) => !kept.includes(part));
    const left = added(rest, (part) => Math.abs(this.shares[part]));
    const more = rest.length > 0 && element("li", { class: "quiet" },
      `${kept.length ? "and " : ""}${rest.length.toLocaleString("en")} more${left < 0.0005 ? "" : ` · ${percent(left)}`}`);
    return element("section", { class: `column ${name}`, "aria-label": name },
      element("h3", { class: "label", "data-tip": `${percent(share)} of the relevance of this step lies in this part.` }, name, " ", element("b", {}, share ? percent(share) : "")),
      element("ol", {}, kept.map((part) => element("li", {}, this.#box(part))), more));
  }

  #box(part) {
    const { view: { example }, page, trace, unit } = this;
    const share = this.shares[part];
    const swatch = Math.abs(share) < 0.0005 ? null : page.colors.of(share, this.limit);
    const text = unit.names[part] || example.partText(unit, part);
    const box = element("button", { type: "button", class: this.written.has(part) ? "box written" : "box",
      "data-tip": this.#told(part, share), onclick: () => page.answer.press(unit.bounds[part], part) },
    token(abridged(text, BOX_LETTERS)), element("small", {}, Math.abs(share) < 0.0005 ? "" : percent(Math.abs(share))));
    if (swatch) Object.assign(box.style, { backgroundColor: swatch.css, color: swatch.text });
    box.unitPart = part;
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
    const ribbons = this.#ribbons();
    const outer = ribbons.filter(({ isAround }) => isAround);
    const lane = added(outer, ({ width }) => width + 1);
    const [, aside] = this.columns.querySelectorAll("ol");
    aside.style.paddingBottom = lane ? `${lane + LANE}px` : "";
    this.node.classList.toggle("loops", ribbons.some(({ isAside, isLast }) => isAside && isLast));
    const frame = this.node.getBoundingClientRect();
    this.drawing.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
    const rectangle = (node) => {
      const { left, right, top, bottom } = node.getBoundingClientRect();
      return { left: left - frame.left, right: right - frame.left, top: top - frame.top, bottom: bottom - frame.top };
    };
    const rectangles = new Map([...this.boxes].map(([part, box]) => [part, rectangle(box)]));
    const ends = new Map();
    const column = rectangle(aside);
    for (const ribbon of ribbons) {
      ribbon.source = rectangles.get(ribbon.from);
      ribbon.target = ribbon.to === TOGETHER ? enclosing(this.#together(ribbon.hop).map((part) => rectangles.get(part))) : rectangles.get(ribbon.to);
      for (const end of ["from", "to"]) {
        const key = `${end}${ribbon.isAside}${ribbon[end]}${ribbon.to === TOGETHER ? ribbon.hop : ""}`;
        ends.set(key, [...(ends.get(key) ?? []), { ribbon, end }]);
      }
    }
    // Ribbons that meet at a box lie one below the other.
    for (const list of ends.values()) {
      const other = ({ ribbon, end }) => middle(end === "from" ? ribbon.target : ribbon.source);
      list.sort((a, b) => other(a) - other(b));
      let at = -added(list, ({ ribbon }) => ribbon.width + 1) / 2;
      for (const { ribbon, end } of list) {
        ribbon[end === "from" ? "leaves" : "arrives"] = at + (ribbon.width + 1) / 2;
        at += ribbon.width + 1;
      }
    }
    // Ribbons that go around the reasoning lie below it, the lowest source lowest.
    outer.sort((a, b) => middle(a.source) - middle(b.source)).reduce((at, ribbon) => {
      ribbon.lane = { left: column.left, right: column.right, y: at + ribbon.width / 2 };
      return at + ribbon.width + 1;
    }, column.bottom - lane);
    fill(this.drawing, ribbons.toReversed().map((ribbon) => this.#ribbon(ribbon)));
  }

  // The largest links between boxes: those of this hop, and in gray what came before and comes after.
  #ribbons() {
    const isStacked = this.node.classList.contains("stacked");
    const regions = this.view.example.whole.regions;
    const columnOf = (part) => regions.findIndex(({ end }) => this.unit.bounds[part][0] < end);
    const size = (link) => (this.hop === "all" ? link.reach : link.share);
    const isBetween = ({ hop, from, to }) => this.boxes.has(from) && (to === TOGETHER ? this.#together(hop).length > 0 : this.boxes.has(to));
    const found = this.links.filter(isBetween).map((link) => ({ ...link, isActive: this.#isActive(link.hop) }))
      .filter((link) => (link.isActive ? size(link) : link.reach) >= LEAST_RIBBON)
      .sort((a, b) => b.isActive - a.isActive || b.reach - a.reach).slice(0, MOST_RIBBONS);
    const most = Math.max(...found.filter(({ isActive }) => isActive).map(size)) || 1;
    const all = added(found, (link) => (link.isActive ? size(link) : 0)) || 1;
    // Pixels of a share of one, so that the widest ribbon and all of them together have room.
    const scale = Math.min(WIDEST_RIBBON / most, ALL_RIBBONS / all) / (isStacked ? 1.5 : 1);
    return found.map((link) => {
      const columns = [link.from, link.to === TOGETHER ? this.#together(link.hop)[0] : link.to].map(columnOf);
      return { ...link, isStacked, isLast: columns[1] === regions.length - 1, isAside: isStacked || columns[0] >= columns[1], isAround: !isStacked && columns[1] - columns[0] > 1,
        width: link.isActive ? Math.max(1.5, scale * size(link)) : Math.max(1, 0.6 * scale * link.reach) };
    });
  }

  // All boxes that one row explains.
  #together(hop) {
    const parts = hop === 0 ? this.trace.picked : this.#own(this.trace.hops[hop - 1].row);
    const column = (part) => this.boxes.get(part)?.closest("section");
    const held = [...new Set(parts)].filter((part) => this.boxes.has(part));
    return held.filter((part) => column(part) === column(held[0]));
  }

  #ribbon({ from, to, sign, width, isActive, isAside, isStacked, source, target, leaves, arrives, lane }) {
    const itself = from === to ? (source.bottom - source.top) / 4 : 0; // a part that was written from itself
    const [y1, y2] = [middle(source) + leaves + itself, middle(target) + arrives - itself];
    const tip = Math.max(4, width * 0.5 + 2.5);
    const side = isAside && !isStacked ? 1 : -1; // of the box at which a ribbon arrives
    const [x1, x2] = [isStacked ? source.left : source.right, side > 0 ? target.right : target.left];
    const end = x2 + side * tip;
    const out = itself ? 12 : Math.min(isStacked ? 40 : 58, 24 + Math.abs(y2 - y1) * 0.2);
    const bend = Math.min(90, (end - x1) / 2);
    const line = isAside ? curve(x1, y1, x1 + side * out, end + side * out, end, y2)
      : !lane ? curve(x1, y1, x1 + bend, end - bend, end, y2)
        : `${curve(x1, y1, (x1 + lane.left) / 2, (x1 + lane.left) / 2, lane.left, lane.y)}H${lane.right}`
          + curve(lane.right, lane.y, (lane.right + end) / 2, (lane.right + end) / 2, end, y2).replace(/^M[^C]*/, "");
    const head = `M${x2} ${y2}l${side * tip} ${-tip}v${2 * tip}z`;
    const color = isActive ? this.page.colors.of(sign, 1.6).css : this.page.colors.line;
    const group = svg("g", { class: isActive ? "ribbon active" : "ribbon" },
      svg("path", { d: line, fill: "none", stroke: color, "stroke-width": width }), svg("path", { d: head, fill: color }));
    Object.assign(group, { from, to });
    return group;
  }

  // The ribbons of the box that is pointed at.
  #light(target) {
    const part = target?.closest?.(".box")?.unitPart;
    this.node.classList.toggle("lit", part !== undefined);
    for (const group of this.drawing.children) {
      group.classList.toggle("on", part !== undefined && (group.from === part || group.to === part));
    }
  }
}

const middle = ({ top, bottom }) => (top + bottom) / 2;
const curve = (x1, y1, a, b, x2, y2) => `M${x1} ${y1}C${a} ${y1} ${b} ${y2} ${x2} ${y2}`;

// The rectangle around several boxes of a column.
const enclosing = (boxes) => ({ left: boxes[0].left, right: boxes[0].right,
  top: Math.min(...boxes.map(({ top }) => top)), bottom: Math.max(...boxes.map(({ bottom }) => bottom)) });
