// How the score falls while parts of the input are removed: one curve per method.
import { element, fill, svg } from "./dom.js";
import { count, percent, plain, visible } from "./format.js";

const [WIDTH, HEIGHT] = [100, 100]; // of the drawing, which is stretched over its place

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
    fill(this.rows, methods.map((method) => this.#row(check, method, state)), random(check));
  }

  #drawing(check, methods, state) {
    const curves = methods.map(({ name }) => [name, check.curves[name]]);
    const values = [...curves.map(([, curve]) => curve), check.random].flat();
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const last = check.shares.at(-1);
    const path = (curve) => curve.map((value, k) => [
      k ? "L" : "M", (WIDTH * check.shares[k]) / last, (HEIGHT * (high - value)) / (high - low || 1),
    ].join(" ")).join(" ");
    const isChosen = ([name]) => name === state.method.name;
    // The chosen one is drawn last, over the others.
    const ordered = [...curves.filter((each) => !isChosen(each)), ...curves.filter(isChosen)];
    const label = `Mean ${check.score} while ${count(methods.length, "method")} remove parts, most relevant first`;
    return [
      element("div", { class: "high" }, element("span", {}, plain(high)), element("span", {}, plain(low))),
      svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
        "aria-label": label },
      svg("path", { class: "axis", d: `M 0 0 L 0 ${HEIGHT} L ${WIDTH} ${HEIGHT}` }),
      svg("path", { class: "random", d: path(check.random) }),
      ordered.map((each) => svg("path", { class: isChosen(each) ? "chosen" : "", d: path(each[1]) },
        svg("title", {}, visible(this.#title(each[0])))))),
      element("div", { class: "wide" }, element("span", {}, "nothing removed"),
        element("span", {}, `${percent(last)} removed, replaced ${visible(check.removed)}`)),
    ];
  }

  #title(name) {
    return this.page.data.methods.find((method) => method.name === name).title;
  }

  #row(check, method, state) {
    const isChosen = method.name === state.method.name;
    return element("tr", { class: isChosen ? "chosen" : "" },
      element("td", {}, key(isChosen ? "chosen" : ""), element("button", {
        type: "button", class: "link", "data-tip": visible(method.note),
        onclick: () => this.page.set({ m: method.name }),
      }, visible(method.title))),
      element("td", {}, plain(check.areas[method.name])),
      element("td", {}, `${check.beaten[method.name]} of ${check.orders}`));
  }
}

function random(check) {
  return element("tr", {}, element("td", {}, key("random"), "random orders"),
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
