// Maps: which token reads how much of which, as thumbnails, and one of them large.
import { Rows, quantile } from "./data.js";
import { added, brush, clamp, element, fill, hasModifier, range, raster, taken } from "./dom.js";
import { digits, name, percent, signed, token, visible } from "./format.js";

const MOST_CELLS = 512;
const LABEL = 11; // pixels that a label needs

// A grid of values, and how to name its rows and columns. A cell stands for `pool` tokens per side.
class Grid {
  constructor(rows, { title, unit, pool, queries }) {
    Object.assign(this, { rows, title, unit, pool, queries });
    this.columns = rows[0]?.length ?? 0;
    this.isSigned = rows.some((row) => row.some((value) => value < 0));
    // Cells that no query reads are gray, unless the model reads in both directions.
    const later = (row, r) => row.some((value, column) => value && column * pool > queries[r]);
    this.isCausal = !rows.some(later);
    this.sums = rows.map((row) => added(row, Math.abs) || 1);
  }

  isUnread(row, column) {
    return this.isCausal && column * this.pool > this.queries[row];
  }

  // The own share hides all else where it is large, here as in the text.
  isOwn(row, column) {
    return column === Math.floor(this.queries[row] / this.pool);
  }

  paint(colors, percentage, hidesOwn) {
    const isShown = (row, column) =>
      !this.isUnread(row, column) && !(hidesOwn && this.pool === 1 && this.isOwn(row, column));
    const values = this.rows.flatMap((row, r) => [...row].filter((value, c) => value && isShown(r, c)));
    this.limit = quantile(values, percentage) || 1;
    this.image = raster(this.columns, this.rows.length, (cell) => {
      const [row, column] = [Math.floor(cell / this.columns), cell % this.columns];
      if (!isShown(row, column)) return [...colors.nothing, 255];
      return [...colors.of(this.rows[row][column], this.limit).rgb, 255];
    });
  }
}

// The rows of a method, one per output.
function outputGrid(example, method) {
  const picks = range(example.outputs.length).map((k) => example.pick(String(k)));
  const pool = Math.ceil(example.tokens.length / MOST_CELLS);
  const rows = picks.map((pick) => {
    const strongest = new Float32Array(Math.ceil(example.tokens.length / pool));
    const terms = pick && example.terms(pick, example.contrasts(pick)[0]);
    for (const [row, sign] of terms ?? []) {
      example.rows[method.name].row(row).forEach((value, k) => {
        const cell = Math.floor(k / pool);
        if (Math.abs(value) > Math.abs(strongest[cell])) strongest[cell] = sign * value;
      });
    }
    return strongest;
  });
  const queries = example.outputs.map(({ position }) => position);
  const title = `${visible(method.title)}: outputs × sources`;
  return new Grid(rows, { title, unit: "relevance", pool, queries });
}

function layerGrid({ group, layer, data }) {
  const rows = range(data.count).map((row) => data.row(row));
  const queries = rows.map((_, row) => row * layer.pool + layer.pool - 1);
  const title = `${group.name}, ${layer.name}`;
  return new Grid(rows, { title, unit: group.unit, pool: layer.pool, queries });
}

export class Maps {
  constructor(page) {
    this.page = page;
    this.groups = element("div", { class: "thumbnails" });
    this.viewer = new MapViewer(page);
    this.node = element("section", { class: "maps" },
      element("h2", { class: "label", "data-word": "maps" }, "Maps"), this.groups, this.viewer.node);
    // With many layers, only the thumbnails in view are drawn.
    this.observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        this.thumbnails.get(target.dataset.map).isSeen = isIntersecting;
        if (isIntersecting) this.#draw(target.dataset.map);
      }
    }, { rootMargin: "600px" });
  }

  dispose() {
    this.observer.disconnect();
  }

  #build(view) {
    const { example, state } = view;
    this.example = example;
    this.observer.disconnect();
    this.thumbnails = new Map();
    this.grids = new Map();
    const groups = example.maps.map((group) => {
      const layers = example.layers.filter((layer) => layer.group === group);
      const labels = distinct(layers.map(({ layer }) => layer.name));
      return { title: group.name, items: layers.map(({ id }, k) => ({ id, label: labels[k] })) };
    });
    if (state.mapIds.includes("out")) {
      groups.unshift({ title: "This method", items: [{ id: "out", label: "outputs × sources" }] });
    }
    fill(this.groups, groups.map(({ title, items }) => element("div", { class: "group" },
      element("h3", {}, title), element("div", { class: "row" }, items.map(({ id, label }) => {
        const canvas = element("canvas", { "aria-hidden": "true" });
        const button = element("button", { type: "button", class: "thumbnail", "data-map": id,
          "aria-label": `${title}, ${label}: open the map`,
          onclick: () => this.page.set({ map: state.values.map === id ? "" : id }) },
        canvas, element("span", {}, label));
        this.thumbnails.set(id, { canvas, button, isSeen: false, drawn: null });
        this.observer.observe(button);
        return button;
      })))));
    this.node.hidden = groups.length === 0;
  }

  update(view) {
    this.view = view;
    if (this.example !== view.example) this.#build(view);
    for (const [id, thumbnail] of this.thumbnails) {
      thumbnail.button.setAttribute("aria-expanded", String(id === view.state.values.map));
      if (thumbnail.isSeen) this.#draw(id);
    }
    this.#show();
  }

  resize() {
    for (const thumbnail of this.thumbnails.values()) thumbnail.drawn = null;
  }

  async #show() {
    const { map } = this.view.state.values;
    const grid = map ? await this.grid(map) : null;
    if (map === this.page.state.values.map) this.viewer.show(map, grid, this.view);
  }

  async #draw(id) {
    const grid = await this.grid(id);
    const thumbnail = this.thumbnails.get(id);
    if (!thumbnail || thumbnail.drawn === grid.image) return;
    thumbnail.drawn = grid.image;
    const { context, width, height } = brush(thumbnail.canvas);
    context.imageSmoothingEnabled = grid.columns > 2 * width;
    context.imageSmoothingQuality = "high";
    context.drawImage(grid.image, 0, 0, width, height);
  }

  // Unpacked when it is first seen, painted again when the colors change.
  async grid(id) {
    const { example, state } = this.view;
    const { q, own, m } = state.values;
    const key = id === "out" ? `out ${m}` : id;
    if (!this.grids.has(key)) {
      if (id === "out") this.grids.set(key, outputGrid(example, state.method));
      else {
        const layer = example.layers.find((layer) => layer.id === id);
        layer.data ??= await Rows.unpack(layer.layer.values);
        this.grids.set(key, layerGrid(layer));
      }
    }
    const grid = this.grids.get(key);
    const look = [q, own, this.page.theme].join();
    if (grid.look !== look) {
      grid.paint(this.page.colors, q, !own);
      grid.look = look;
    }
    return grid;
  }
}

class MapViewer {
  constructor(page) {
    this.page = page;
    const button = (text, label, act) =>
      element("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
    this.title = element("h3");
    this.low = element("span", { class: "quiet" });
    this.high = element("span", { class: "quiet" });
    this.ramp = element("canvas", { class: "ramp", "aria-hidden": "true" });
    this.readout = element("p", { class: "readout", "aria-live": "polite" });
    this.canvas = element("canvas", {
      class: "map",
      tabindex: 0,
      role: "img",
      onpointerdown: (event) => this.#press(event),
      onpointermove: (event) => this.#move(event),
      onpointerup: () => this.#release(),
      onpointerleave: () => this.drag || this.#pointAt(-1, -1),
      ondblclick: (event) => this.#zoom(2, ...this.#inMap(event)),
      onkeydown: (event) => this.#key(event),
    });
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.#zoom(Math.exp(-event.deltaY / 200), ...this.#inMap(event));
    }, { passive: false });
    this.node = element("div", { class: "viewer", hidden: true },
      element("header", {}, this.title,
        element("span", { class: "range" }, this.low, this.ramp, this.high),
        element("span", { class: "segments" },
          button("−", "Zoom out", () => this.#zoom(1 / 1.6)),
          button("+", "Zoom in", () => this.#zoom(1.6)),
          button("Fit", "Whole map", () => this.#fit()),
          button("Close", "Close the map", () => page.set({ map: "" })))),
      this.readout, this.canvas);
  }

  show(id, grid, view) {
    this.node.hidden = !grid;
    this.grid = grid;
    if (!grid) {
      this.id = "";
      return;
    }
    this.view = view;
    const { example } = view;
    const isOpened = this.id !== id;
    if (isOpened) {
      Object.assign(this, { id, zoom: 1, left: 0, top: 0, row: -1, column: -1 });
    }
    this.title.textContent = grid.title;
    this.low.textContent = grid.isSigned ? `−${digits(grid.limit)}` : "0";
    this.high.textContent = `${grid.isSigned ? "+" : ""}${digits(grid.limit)} ${grid.unit}`;
    const { context, width, height } = brush(this.ramp);
    this.page.colors.ramp(context, width, height, grid.isSigned ? -1 : 0);
    this.canvas.setAttribute("aria-label",
      `${grid.title}. Rows are queries, columns are sources. Arrow keys move, plus and minus zoom.`);
    const hasTokens = grid.pool === 1 && example.tokens.length > 0;
    const label = (k) => (hasTokens ? name(example.tokens[k]) : String(k * grid.pool));
    this.columnLabel = label;
    this.rowLabel = id === "out"
      ? (row) => name(example.answer(example.pick(String(row))).text)
      : label;
    this.draw();
    // Below the fold nobody would see that a map was opened; where the page opens, it stays put.
    if (isOpened && this.page.isReady) this.node.scrollIntoView({ block: "nearest" });
  }

  // The row of an output.
  #rowOf({ output }) {
    if (this.id === "out") return output;
    const { position } = this.view.example.outputs[output];
    return position === null ? -1 : Math.floor(position / this.grid.pool);
  }

  draw() {
    if (!this.grid || this.node.hidden) return;
    const { grid, page } = this;
    const { colors } = page;
    const count = grid.rows.length;
    const full = this.node.getBoundingClientRect().width;
    this.gutter = full < 500 ? 64 : 96;
    this.width = full - this.gutter - 2;
    const isWide = this.id === "out";
    this.height = isWide ? Math.min(22 * count, 560) : Math.min(this.width, 22 * count, 640);
    const [across, down] = [this.width / grid.columns, this.height / count];
    this.across = (isWide ? across : Math.min(across, down)) * this.zoom;
    this.down = (isWide ? down : Math.min(across, down)) * this.zoom;
    this.left = clamp(this.left, Math.min(0, this.width - this.across * grid.columns), 0);
    this.top = clamp(this.top, Math.min(0, this.height - this.down * count), 0);
    this.canvas.style.height = `${this.height + 66}px`;

    const { context } = brush(this.canvas);
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, this.width, this.height);
    context.clip();
    context.imageSmoothingEnabled = this.across < 1;
    context.drawImage(grid.image, this.gutter + this.left, this.top,
      this.across * grid.columns, this.down * count);
    this.#drawCross(context);
    context.restore();
    this.#drawLabels(context, colors);
    this.#read();
  }

  #drawCross(context) {
    const source = this.#source();
    context.strokeStyle = this.page.colors.focus;
    const x = this.gutter + this.left + source * this.across;
    const y = this.top + this.row * this.down;
    const edge = this.gutter + this.left + this.grid.columns * this.across;
    const [wide, tall] = [Math.max(2, this.across), Math.max(2, this.down)];
    const [hasRow, hasColumn] = [this.row >= 0, source >= 0];
    context.globalAlpha = 0.5;
    if (hasRow) context.strokeRect(this.gutter + 0.5, y + 0.5, edge - this.gutter - 1, tall - 1);
    if (hasColumn) context.strokeRect(x + 0.5, 0.5, wide - 1, this.height - 1);
    context.globalAlpha = 1;
    context.lineWidth = 2;
    if (hasRow && hasColumn) context.strokeRect(x, y, wide, tall);
    context.lineWidth = 1;
  }

  // The column that is pointed at, here or anywhere on the page.
  #source() {
    const { pointed, view } = this.page;
    if (this.column >= 0 || pointed < 0 || !view.unit.bounds) return this.column;
    return Math.floor(view.unit.bounds[pointed][0] / this.grid.pool);
  }

  #drawLabels(context, colors) {
    const { grid, view, gutter } = this;
    const { state } = view;
    const picks = [state.pick, ...(state.values.view === "pair" ? [state.second] : [])];
    const queries = picks.map((pick) => this.#rowOf(pick));
    const write = (text, x, y, isStrong, most) => {
      context.font = `${isStrong ? "600 " : ""}11.5px ${colors.text}`;
      context.fillStyle = isStrong ? colors.ink : colors.soft;
      context.fillText(shortened(context, text, most), x, y);
    };
    context.textBaseline = "middle";
    context.textAlign = "right";
    const count = grid.rows.length;
    const rows = spaced(count, this.down, this.top, this.height, [this.row, ...queries]);
    for (const { k, at, isStrong } of rows) {
      write(this.rowLabel(k), gutter - 13, at, isStrong, gutter - 16);
    }
    const foot = Math.min(this.height, this.top + this.down * count) + 8;
    const columns = spaced(grid.columns, this.across, this.left, this.width, [this.#source()]);
    for (const { k, at, isStrong } of columns) {
      context.save();
      context.translate(gutter + at + 3, foot);
      context.rotate(-Math.PI / 3);
      write(this.columnLabel(k), 0, 0, isStrong, 60);
      context.restore();
    }
    // A triangle where each explained output is read: full for the first, empty for the second.
    context.fillStyle = context.strokeStyle = colors.ink;
    queries.forEach((row, k) => {
      const y = this.top + (row + 0.5) * this.down;
      if (row < 0 || y < 0 || y > this.height) return;
      context.beginPath();
      context.moveTo(gutter - 9, y - 4);
      context.lineTo(gutter - 3, y);
      context.lineTo(gutter - 9, y + 4);
      context.closePath();
      if (k) context.stroke();
      else context.fill();
    });
  }

  #read() {
    const { grid, row, column, view: { example } } = this;
    if (row < 0 || column < 0) {
      const rows = this.id === "out" ? "outputs" : "queries";
      const size = `${grid.pool} × ${grid.pool}`;
      const pooled = grid.pool > 1 ? ` One cell is the strongest of ${size} tokens.` : "";
      fill(this.readout, `Rows are ${rows}, columns are sources. ` +
        `Point at a cell, or use the arrow keys. Ctrl or ⌘ and the wheel zoom.${pooled}`);
      return;
    }
    const named = (k) => {
      const last = Math.min(example.tokens.length, (k + 1) * grid.pool) - 1;
      const numbers = grid.pool > 1 ? `${k * grid.pool}–${last}` : `${k}`;
      if (!example.tokens.length) return `token ${numbers}`;
      return [token(example.text(k * grid.pool, last + 1)), ` (${numbers})`];
    };
    const query = this.id === "out" ? ["output ", token(this.rowLabel(row))] : named(row);
    if (grid.isUnread(row, column)) {
      fill(this.readout, query, " comes before ", named(column), " and does not read it.");
      return;
    }
    const value = grid.rows[row][column];
    const share = grid.pool > 1 ? "" : `, ${percent(Math.abs(value) / grid.sums[row])} of its row`;
    fill(this.readout, query, " ← ", named(column), ": ",
      element("b", {}, grid.isSigned ? signed(value) : digits(value)), share);
  }

  #fit() {
    Object.assign(this, { zoom: 1, left: 0, top: 0 });
    this.draw();
  }

  #zoom(factor, x = this.width / 2, y = this.height / 2) {
    const closest = Math.max(1, (40 * this.zoom) / this.across);
    const zoom = clamp(this.zoom * factor, 1, closest);
    const scale = zoom / this.zoom;
    Object.assign(this, { zoom, left: x - (x - this.left) * scale, top: y - (y - this.top) * scale });
    this.draw();
  }

  #inMap(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left - this.gutter, event.clientY - box.top];
  }

  #pointAt(row, column) {
    if (row === this.row && column === this.column) return;
    Object.assign(this, { row, column });
    this.draw();
  }

  #press(event) {
    this.drag = { x: event.clientX, y: event.clientY, left: this.left, top: this.top, isFar: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  #move(event) {
    if (this.drag) {
      const [right, down] = [event.clientX - this.drag.x, event.clientY - this.drag.y];
      this.drag.isFar ||= Math.hypot(right, down) > 4;
      if (!this.drag.isFar) return;
      Object.assign(this, { left: this.drag.left + right, top: this.drag.top + down });
      this.draw();
      return;
    }
    const [x, y] = this.#inMap(event);
    const column = Math.floor((x - this.left) / this.across);
    const row = Math.floor((y - this.top) / this.down);
    const { columns, rows } = this.grid;
    const isInside = x >= 0 && y < this.height && column < columns && row < rows.length;
    this.#pointAt(isInside ? row : -1, isInside ? column : -1);
  }

  #release() {
    const wasClick = this.drag && !this.drag.isFar;
    this.drag = null;
    if (wasClick) this.#choose();
  }

  // The output that is read in this row.
  #choose() {
    const { example } = this.view;
    const output = range(example.outputs.length).find((k) => this.#rowOf({ output: k }) === this.row);
    if (output !== undefined && this.row >= 0) this.page.set({ t: String(output) });
  }

  #key(event) {
    if (hasModifier(event)) return;
    const step = {
      ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
    }[event.key];
    if (step) this.#step(step);
    else if (event.key === "+" || event.key === "=") this.#zoom(1.6);
    else if (event.key === "-") this.#zoom(1 / 1.6);
    else if (event.key === "0") this.#fit();
    else if (event.key === "Enter") this.#choose();
    else if (event.key === "Escape") this.page.set({ map: "" });
    else return;
    taken(event);
  }

  #step([down, right]) {
    const { grid } = this;
    const starts = this.row < 0 || this.column < 0;
    const row = starts ? Math.max(0, this.#rowOf(this.view.state.pick)) : this.row + down;
    const column = starts ? 0 : this.column + right;
    this.#pointAt(clamp(row, 0, grid.rows.length - 1), clamp(column, 0, grid.columns - 1));
    const x = this.left + this.column * this.across;
    const y = this.top + this.row * this.down;
    if (x < 0 || x + this.across > this.width) this.left += this.width / 2 - x;
    if (y < 0 || y + this.down > this.height) this.top += this.height / 2 - y;
    this.draw();
  }
}

// What names of modules do not have in common: "layers.0.mixer" is layer 0.
function distinct(names) {
  const parts = names.map((name) => name.split("."));
  const isCommon = (k) => parts.every((part) => part.at(k) === parts[0].at(k));
  if (names.length < 2) return names;
  let [start, end] = [0, 0];
  while (start < parts[0].length && isCommon(start)) start++;
  while (end < parts[0].length - start && isCommon(-1 - end)) end++;
  return parts.map((part) => {
    const rest = part.slice(start, part.length - end).join(".");
    return /^\d+$/.test(rest) ? `layer ${rest}` : rest;
  });
}

// The labels that have room: those to point out first, then every so many of the others.
function spaced(count, size, start, room, strong) {
  const every = Math.ceil(LABEL / size);
  const others = range(Math.ceil(count / every)).map((k) => k * every);
  const found = [];
  for (const k of [...strong, ...others]) {
    const at = start + (k + 0.5) * size;
    const isFree = found.every((other) => Math.abs(other.at - at) >= LABEL - 0.5);
    if (k < 0 || k >= count || at < 0 || at > room || !isFree) continue;
    found.push({ k, at, isStrong: strong.includes(k) });
  }
  return found;
}

function shortened(context, text, most) {
  if (context.measureText(text).width <= most) return text;
  const signs = [...text];
  while (signs.length > 1 && context.measureText(`${signs.join("")}…`).width > most) signs.pop();
  return `${signs.join("")}…`;
}
