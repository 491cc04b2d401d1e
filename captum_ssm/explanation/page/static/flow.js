// The section of the circuit: the path in a sentence, its picture, how much the edges carry, and what
// arrives and leaves where one points.
import { Toggle } from "./controls.js";
import { element, fill, hasModifier, taken } from "./dom.js";
import { FlowCurve } from "./flow_curve.js";
import { FLOW_START, FLOW_SWITCHES, bySize, largestHead, spot } from "./flow_graph.js";
import { FlowLedger } from "./flow_ledger.js";
import { FlowPicture } from "./flow_picture.js";
import { FlowStrip } from "./flow_strip.js";
import { flowAloud, flowTitle, pathLine, pathSentence, shareOf } from "./flow_words.js";
import { count, percent, quoted, signed } from "./format.js";

const PAPER_WIDTH = 680; // pixels across a sheet
const PAPER_HEIGHT = 760;

const colorMark = (side) => element("i", { class: `swatch ${side}` });

export class Flow {
  constructor(page) {
    this.page = page;
    const set = (change) => page.set(change);
    const toggle = (word, key) => new Toggle(word, (isOn) => set({ [key]: isOn ? 1 : 0 }));
    this.toggles = { pos: toggle("supporting", "pos"), neg: toggle("opposing", "neg"), kept: toggle("kept", "kept"),
      heads: toggle("heads", "heads"), fold: toggle("fold", "fold") };
    this.toggles.pos.node.append(colorMark("for"));
    this.toggles.neg.node.append(colorMark("against"));
    this.sentence = element("p", { class: "decided" });
    this.facts = element("p", { class: "quiet facts" });
    this.picture = new FlowPicture(page);
    this.strip = new FlowStrip(page, this.picture);
    this.legend = element("p", { class: "quiet" });
    this.curve = new FlowCurve((edges) => set({ edges }));
    this.ways = element("div", { class: "ways", role: "group", "aria-label": "Paths to the answer" });
    this.ledger = new FlowLedger(page);
    this.elsewhere = element("p", { class: "quiet" });
    this.figure = element("figure", {}, element("div", { class: "line controls", role: "group", "aria-label": "Shown in the circuit" },
      Object.values(this.toggles).map(({ node }) => node)), this.picture.node, this.strip.node, this.legend);
    this.body = element("div", { class: "circuit-body" }, this.figure, element("div", { class: "circuit-side" }, this.curve.node,
      element("section", {}, element("h3", { class: "label", "data-word": "paths" }, "Paths to the answer"), this.ways),
      this.ledger.node));
    this.node = element("section", { class: "circuit", "aria-label": "Circuit" },
      element("h2", { class: "label", "data-word": "circuit" }, "Circuit"), this.elsewhere, this.sentence, this.facts, this.body);
    this.#listen();
  }

  // The circuit of the chosen answer; where it has none, a line says which answer has one.
  update(state) {
    const { example, pick } = state;
    this.node.hidden = !example.circuits.length;
    this.graph = example.circuit(pick);
    if (this.node.hidden) return;
    for (const part of [this.sentence, this.facts, this.body]) part.hidden = !this.graph;
    this.elsewhere.hidden = Boolean(this.graph);
    if (this.graph) this.#draw(state.values);
    else fill(this.elsewhere, this.#offers(example));
  }

  // Whether a change is of nothing else on the page.
  owns(change) {
    return Object.keys(change).every((key) => key in FLOW_START || key in FLOW_SWITCHES);
  }

  #offers(example) {
    const picks = example.outputs.flatMap((_, k) => example.picks(k)).filter((pick) => example.circuit(pick));
    return ["No circuit was computed for this answer; there is one for ", picks.map((pick, n) => [n > 0 && ", ",
      element("button", { type: "button", class: "link", onclick: () => this.page.set({ t: example.written(pick) }) },
        quoted(example.answer(pick).text))]), "."];
  }

  #draw(values) {
    const { graph, page } = this;
    const k = graph.nearest(values.edges);
    this.path = graph.paths[values.path] ?? graph.paths[graph.told];
    const { activeElement } = document;
    const focused = this.picture.picture.contains(activeElement) && activeElement.dataset.id;
    this.view = graph.shown({ k, path: this.path, isFolded: values.fold, isFor: values.pos, isAgainst: values.neg, isKept: values.kept });
    this.chosen = values.at;
    this.#words(values, k);
    this.curve.update(graph, k);
    this.#picture(values);
    this.picture.isolate(this.chosen);
    this.#point("");
    if (focused) this.picture.focus(focused);
    const kind = [values.e, graph.at, this.picture.node.clientWidth].join();
    if (kind !== this.kind) this.picture.scroller.scrollLeft = this.picture.layout.width; // the answer is there
    this.kind = kind;
    if (!page.isPrinting) this.strip.draw();
  }

  // On paper the whole drawing is on one sheet, smaller if it has to be.
  #picture(values) {
    const { picture, page, graph, view, path, figure } = this;
    const draw = () => {
      picture.draw({ graph, view, path, values });
      this.strip.draw();
    };
    figure.style.width = page.isPrinting ? `${PAPER_WIDTH}px` : "";
    figure.style.zoom = 1;
    draw();
    if (!page.isPrinting) return;
    const { width, height } = picture.layout;
    const room = picture.scroller.clientWidth;
    const zoom = Math.min(1, room / width, PAPER_HEIGHT / height);
    if (zoom === 1) return;
    figure.style.width = `${PAPER_WIDTH / zoom}px`;
    figure.style.zoom = zoom;
    draw();
  }

  #words(values, k) {
    const { graph, path } = this;
    const { score } = graph;
    fill(this.sentence, path ? pathSentence(graph, path) : "No path of edges leads to this answer.");
    const larger = graph.paths.filter(({ share }) => path && share > path.share).sort((a, b) => b.share - a.share)[0];
    const isOwn = larger && larger.start === graph.at && larger.steps.every(({ id }) => !id);
    const differs = graph.predicted !== undefined && graph.predicted !== graph.answer;
    fill(this.facts,
      Boolean(larger) && [isOwn ? ["More, ", percent(larger.share), ", is what ", quoted(graph.tokens[graph.at]), " keeps of its own."]
        : ["The largest path is another: ", element("span", { class: "way" }, pathLine(graph, larger)), `, ${percent(larger.share)}.`], " "],
      `The score is ${signed(score.value)}${score.of === "contrast" ? ", the answer’s logit against those of the others" : ""}`,
      score.of === "difference" && [", the answer’s logit minus that of ", quoted(graph.against)], ". ",
      `${count(k, "edge")} of ${graph.of.toLocaleString("en")} ${k === 1 ? "is" : "are"} drawn.`,
      differs && [" The model predicts ", quoted(graph.predicted), "."]);
    const unused = { fold: graph.depth < 4, heads: !graph.reads.some(({ heads }) => heads.length > 1) };
    for (const [key, each] of Object.entries(this.toggles)) {
      each.show(values[key]);
      each.node.hidden = Boolean(unused[key]);
    }
    this.#paths();
    fill(this.legend, "Read upwards; width is relevance: ", colorMark("for"), " for the answer, ", colorMark("against"), " against it. ",
      graph.isHybrid && "Attention’s edges jump, on a shaded layer; a recurrence’s edges run along their layer. ",
      graph.reads.some(({ kind }) => kind === "shift") && "Dashed: token shift. ",
      "Fading ends: what is not drawn. Notch: much of it is the MLP’s.");
  }

  #paths() {
    const { graph, path, ways } = this;
    const focused = [...ways.children].indexOf(document.activeElement);
    fill(ways, graph.paths.map((one, n) => element("button", { type: "button", "aria-pressed": String(one === path),
      onclick: () => this.page.set({ path: n }) },
    element("span", { class: "way" }, pathLine(graph, one)), element("span", {}, percent(one.share)))));
    if (focused >= 0) ways.children[focused]?.focus({ preventScroll: true });
  }

  // Pointing, choosing and walking.

  #listen() {
    const { scroller } = this.picture;
    const on = (events, act) => events.split(" ").forEach((event) => scroller.addEventListener(event, (each) =>
      act(each.target.closest?.("[data-id]")?.dataset.id ?? "", each)));
    on("pointerover", (id, event) => this.#point(id, event));
    on("focusin", (id) => this.#point(id, null));
    on("pointerleave focusout", () => this.#point(""));
    on("click", (id) => this.page.set({ at: id === this.chosen || !this.picture.find(id) ? "" : id }));
    on("keydown", (id, event) => this.#walk(id, event));
    this.node.addEventListener("keydown", (event) => this.#key(event));
  }

  #point(id, event) {
    const { graph, picture, page } = this;
    const thing = picture.find(id);
    picture.mark(thing && id);
    this.ledger.update(graph, thing ?? picture.find(this.chosen) ?? this.view.output);
    if (!thing) {
      page.tip.hide();
      return;
    }
    const box = event ? new DOMRect(event.clientX, event.clientY - 4, 0, 8) : picture.anchor(id);
    page.tip.show(box, [
      element("div", {}, flowTitle(graph, thing)),
      element("div", {}, element("b", {}, signed(thing.value)), ` · ${shareOf(thing.value, graph.score.value)} of the score`),
      element("div", { class: "quiet" }, largestHead(thing)),
    ]);
    if (!event) page.live.textContent = flowAloud(graph, thing);
  }

  // Keys that hold for all of the section.
  #key(event) {
    const { key, target } = event;
    if (hasModifier(event) || !this.graph || !this.page.help.hasLetters || target.type === "checkbox") return;
    const act = {
      "[": () => this.curve.step(-1),
      "]": () => this.curve.step(1),
      p: () => this.page.set({ path: (this.graph.paths.indexOf(this.path) + 1) % this.graph.paths.length }),
      Escape: () => this.chosen && this.page.set({ at: "" }),
    }[key];
    if (!act || (key === "p" && !this.path)) return;
    act();
    taken(event);
  }

  #walk(id, event) {
    const { picture, view, graph, page } = this;
    const thing = picture.find(id);
    if (!thing || hasModifier(event)) return;
    const isEdge = Boolean(thing.source);
    const largest = (links) => links.filter(({ isShown }) => isShown).sort(bySize)[0];
    const ranked = view.links.filter(({ kind, isShown }) => kind === "mix" && isShown).sort(bySize);
    const row = [...view.nodes.values()].filter(({ stage }) => stage === thing.stage).sort((a, b) => a.token - b.token);
    const turn = (by) => ranked.at((ranked.indexOf(thing) + by) % ranked.length);
    const beside = (by) => (isEdge ? turn(by) : row[row.indexOf(thing) + by]);
    const go = {
      ArrowUp: () => (isEdge ? thing.target : largest(thing.out)),
      ArrowDown: () => (isEdge ? thing.source : largest(thing.in)),
      ArrowLeft: () => beside(-1),
      ArrowRight: () => beside(1),
      n: () => (isEdge ? turn(1) : ranked[0]),
      N: () => (isEdge ? turn(-1) : ranked.at(-1)),
      Home: () => view.output,
      End: () => view.nodes.get(spot(0, this.path?.start ?? graph.at)),
    }[event.key];
    if (event.key === "Enter" || event.key === " ") page.set({ at: this.chosen === id ? "" : id });
    else if (go) picture.focus(go()?.id);
    else return;
    taken(event);
  }
}
