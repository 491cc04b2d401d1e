// How the score falls while parts of the input are removed: one curve per method.
import { element, fill, range, svg } from "./dom.js";
import { count, percent, plain, visible } from "./format.js";

const [WIDTH, HEIGHT] = [100, 100]; // of the drawing, which is stretched over its box
const ASPECT = 3; // about how much wider than high that is
const ENOUGH = 20; // between a number and another one, or another curve
const FIRST = 10; // how much more it matters that numbers are apart

export class Check {
  constructor(page) {
    this.page = page;
    this.said = element("p");
    this.plot = element("div", { class: "plot" });
    this.rows = element("tbody");
    this.node = element("section", { class: "check" },
      element("h2", { class: "label", "data-word": "check" }, "Check by removal"),
      this.said, this.plot,
      element("div", { class: "scroller", tabindex: 0, role: "group", "aria-label": "Check by removal" },
        element("table", {}, element("thead", {}, element("tr", {},
          element("th", { scope: "col" }, "method"),
          element("th", { scope: "col", "data-word": "area" }, "mean score"),
          element("th", { scope: "col" }, "random orders beaten"))), this.rows)));
  }

  update({ example, state }) {
    const { check } = example;
    this.node.hidden = !check;
    if (!check) return;
    const methods = this.page.data.methods.filter(({ name }) => name in check.curves)
      .sort((a, b) => check.areas[a.name] - check.areas[b.name]);
    fill(this.said, verdict(check, methods, example));
    fill(this.plot, this.#drawing(check, methods, state));
    const isNumbered = methods.length > 1;
    fill(this.rows, methods.map((method, k) => this.#row(check, method, state, isNumbered && k + 1)),
      random(check, isNumbered));
  }

  #drawing(check, methods, state) {
    const curves = methods.map(({ name }) => check.curves[name]);
    const values = [...curves, check.random].flat();
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const last = check.shares.at(-1);
    const x = (k) => (WIDTH * check.shares[k]) / last;
    const y = (value) => (HEIGHT * (high - value)) / (high - low || 1);
    const path = (curve) => curve.map((value, k) => `${k ? "L" : "M"} ${x(k)} ${y(value)}`).join(" ");
    const isChosen = ({ name }) => name === state.method.name;
    const marked = (method) => ({ "data-method": method.name, class: isChosen(method) ? "chosen" : "" });
    // The chosen one is drawn last, over the others.
    const ordered = [...methods.filter((each) => !isChosen(each)), ...methods.filter(isChosen)];
    const label = `Mean ${check.score} while ${count(methods.length, "method")} remove parts, most relevant first`;
    const lines = curves.map((curve) => curve.map((value, k) => [x(k), y(value)]));
    const free = apart(lines, check.random.map((value, k) => [x(k), y(value)]));
    return [
      element("div", { class: "high" }, element("span", {}, plain(high)), element("span", {}, plain(low))),
      element("div", { class: "curves" },
        svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
          "aria-label": label },
        svg("path", { class: "axis", d: `M 0 0 L 0 ${HEIGHT} L ${WIDTH} ${HEIGHT}` }),
        svg("path", { class: "random", d: path(check.random) }),
        ordered.map((each) => svg("path", { ...marked(each), d: path(check.curves[each.name]) })),
        ordered.map((each) => svg("path", { class: "near", d: path(check.curves[each.name]),
          "data-tip": visible(each.title), ...this.#pointing(each),
          onclick: () => this.page.set({ m: each.name }) }))),
        methods.length > 1 && methods.map((each, k) =>
          atPercent(free[k], element("b", { ...marked(each), "aria-hidden": "true" }, String(k + 1))))),
      element("div", { class: "wide" }, element("span", {}, "nothing removed"),
        element("span", {}, `${percent(last)} removed, replaced ${visible(check.removed)}`)),
    ];
  }

  // What is pointed at in the drawing or the table stands out in both.
  #pointing({ name }) {
    const mark = (isPointed) => {
      for (const node of this.node.querySelectorAll("[data-method]")) {
        node.classList.toggle("pointed", isPointed && node.dataset.method === name);
      }
    };
    return { onpointerenter: () => mark(true), onpointerleave: () => mark(false),
      onfocusin: () => mark(true), onfocusout: () => mark(false) };
  }

  #row(check, method, state, number) {
    const isChosen = method.name === state.method.name;
    return element("tr", { class: isChosen ? "chosen" : "", "data-method": method.name, ...this.#pointing(method) },
      element("td", {}, number && [element("b", {}, String(number)), " "], key(isChosen ? "chosen" : ""), element("button", {
        type: "button", class: "link", "data-tip": visible(method.note),
        onclick: () => this.page.set({ m: method.name }),
      }, visible(method.title))),
      element("td", {}, plain(check.areas[method.name])),
      element("td", {}, `${check.beaten[method.name]} of ${check.orders}`));
  }
}

function atPercent([x, y], node) {
  Object.assign(node.style, { left: `${x}%`, top: `${y}%` });
  return node;
}

// Where each curve is numbered: at the point, or between two, that is far from the numbers of others,
// and then from their curves.
function apart(curves, random) {
  const finer = (curve) => curve.flatMap((point, k) => (k
    ? [curve[k - 1].map((value, axis) => (value + point[axis]) / 2), point] : [point]));
  const [lines, other] = [curves.map(finer), finer(random)];
  const numbers = [];
  for (const line of lines) {
    const others = [...lines.filter((each) => each !== line), other];
    const room = ([x, y], k) => FIRST * Math.min(ENOUGH,
      ...numbers.map((number) => Math.hypot(ASPECT * (number[0] - x), number[1] - y)))
      + Math.min(ENOUGH, ...others.map((each) => Math.abs(each[k][1] - y)));
    const rooms = line.map(room);
    const inner = range(line.length).slice(1, -1);
    numbers.push(line[inner.reduce((best, k) => (rooms[k] > rooms[best] + 1e-9 ? k : best), inner[0] ?? 0)]);
  }
  return numbers;
}

function random(check, isNumbered) {
  return element("tr", {}, element("td", {}, isNumbered && element("b", {}), key("random"), "random orders"),
    element("td", {}, plain(check.area)), element("td", {}, ""));
}

const key = (kind) => svg("svg", { class: "key", viewBox: "0 0 22 8", "aria-hidden": "true" },
  svg("path", { class: kind, d: "M 0 4 L 22 4" }));

// Which method wins on this input, and whether that says anything.
function verdict(check, methods, example) {
  const [best] = methods;
  const beaten = check.beaten[best.name];
  const part = example.isText ? "token" : "part";
  const name = visible(best.title);
  const [first, last] = [check.random[0], check.random.at(-1)].map(plain);
  const end = check.falls ? "" : ` With every ${part} replaced it is ${last}, and with none ${first}: what is left holds the score, too.`;
  if (!check.telling) {
    return `This check says little here: ${check.orders - beaten} of ${check.orders} random orders lower the ${check.score} as fast as ${name}, the fastest method.${end}`;
  }
  const order = `replacing ${methods.length > 1 ? "its" : "the"} most relevant ${part}s first`;
  const who = methods.length > 1
    ? `${name} finds best what the model reads here: ${order}` : `By ${name}, ${order}`;
  return `${who} leaves a mean ${check.score} of ${plain(check.areas[best.name])}; random orders leave ${plain(check.area)}.${end}`;
}
