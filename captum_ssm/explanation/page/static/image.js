// A picture with relevance over it: patches or pixels, a read-out under the pointer.
import { brush, clamp, element, hasModifier, raster } from "./dom.js";
import { digits } from "./format.js";

const WIDEST = 720;
const TALLEST = 620;

export class ImagePanel {
  constructor(page, panel) {
    this.page = page;
    this.example = page.view.example;
    this.unit = page.view.unit;
    this.canvas = element("canvas", {
      class: "picture",
      role: "img",
      tabindex: 0,
      "aria-label": `Picture, ${panel.method.title}: arrow keys move, N goes to the next largest`,
      onpointermove: (event) => page.point(this.#partAt(event), this),
      onpointerdown: (event) => page.point(this.#partAt(event), this),
      onpointerleave: ({ pointerType }) => pointerType === "touch" || page.point(-1),
      onblur: () => page.point(-1),
      onkeydown: (event) => this.#key(event),
    });
    this.note = element("span", { class: "quiet" });
    this.node = element("section", { class: "panel" },
      panel.title && element("header", {}, panel.title, this.note), this.canvas);
    const { size: [height, width], data } = this.example.pixels;
    const color = (pixel) => data.subarray(3 * pixel, 3 * pixel + 3);
    this.picture = raster(width, height, (pixel) => [...color(pixel), 255]);
    this.gray = null;
    this.drawGray = () => raster(width, height, (pixel) => {
      const shade = pale(color(pixel), page.theme === "dark");
      return [shade, shade, shade, 255];
    });
  }

  update(panel) {
    this.panel = panel;
    const { relevance, limit } = panel;
    const [rows, columns] = this.unit.shape;
    if (this.grayTheme !== this.page.theme) {
      this.gray = this.drawGray();
      this.grayTheme = this.page.theme;
    }
    this.overlay = raster(columns, rows, (part) =>
      relevance.has(part) ? this.page.colors.over(relevance.values[part], limit) : [0, 0, 0, 0]);
    this.note.textContent = `scale ±${digits(limit)}`;
    this.draw();
  }

  dispose() {}
  print() {}
  describe() {}

  mark() {
    this.draw();
  }

  reveal() {
    this.canvas.scrollIntoView({ block: "nearest" });
  }

  scroll = 0;

  anchor(part) {
    const box = this.canvas.getBoundingClientRect();
    const { x, y, width, height } = this.#cell(part);
    return new DOMRect(box.x + x, box.y + y, width, height);
  }

  draw() {
    if (!this.panel) return;
    const { width: across, height: down } = this.picture;
    const room = this.node.getBoundingClientRect().width;
    const width = Math.min(room, WIDEST, (TALLEST * across) / down);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${(width * down) / across}px`;
    const { context, height } = brush(this.canvas);
    const { values } = this.page.state;
    context.imageSmoothingEnabled = width < 2 * across;
    context.drawImage(values.gray ? this.gray : this.picture, 0, 0, width, height);
    context.globalAlpha = values.opacity / 100;
    context.imageSmoothingEnabled = false;
    context.drawImage(this.overlay, 0, 0, width, height);
    context.globalAlpha = 1;
    if (this.example.grid && values.grid) this.#drawGrid(context, width, height);
    if (this.page.pointed >= 0) this.#outline(context, this.page.pointed);
  }

  // Dark and light, to be seen on any picture.
  #drawGrid(context, width, height) {
    const [rows, columns] = this.example.grid;
    context.beginPath();
    for (let k = 1; k < columns; k++) line(context, (k * width) / columns, 0, 0, height);
    for (let k = 1; k < rows; k++) line(context, 0, (k * height) / rows, width, 0);
    context.lineWidth = 1;
    context.strokeStyle = "rgb(255 255 255 / 30%)";
    context.stroke();
    context.setLineDash([2, 2]);
    context.strokeStyle = "rgb(0 0 0 / 30%)";
    context.stroke();
    context.setLineDash([]);
  }

  #outline(context, part) {
    const { x, y, width, height } = this.#cell(part);
    context.lineWidth = 4;
    context.strokeStyle = "#fff";
    context.strokeRect(x, y, width, height);
    context.lineWidth = 2;
    context.strokeStyle = this.page.colors.focus;
    context.strokeRect(x, y, width, height);
  }

  #cell(part) {
    const box = this.canvas.getBoundingClientRect();
    const [rows, columns] = this.unit.shape;
    const [width, height] = [box.width / columns, box.height / rows];
    return { x: (part % columns) * width, y: Math.floor(part / columns) * height, width, height };
  }

  #partAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const [rows, columns] = this.unit.shape;
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    return clamp(row, 0, rows - 1) * columns + clamp(column, 0, columns - 1);
  }

  #key(event) {
    if (hasModifier(event)) return;
    const { relevance } = this.panel;
    const [rows, columns] = this.unit.shape;
    const { pointed } = this.page;
    const at = pointed < 0 ? 0 : pointed;
    const [row, column] = [Math.floor(at / columns), at % columns];
    const rank = relevance.ranks.get(pointed) ?? -1;
    const move = (down, right) =>
      clamp(row + down, 0, rows - 1) * columns + clamp(column + right, 0, columns - 1);
    const to = {
      ArrowLeft: move(0, -1),
      ArrowRight: move(0, 1),
      ArrowUp: move(-1, 0),
      ArrowDown: move(1, 0),
      Home: 0,
      End: rows * columns - 1,
      n: relevance.order[rank + 1] ?? at,
      N: relevance.order[Math.max(0, rank - 1)] ?? at,
    }[event.key];
    if (to !== undefined) this.page.point(to, this, { aloud: true });
    else if (event.key === "Escape") this.page.point(-1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

// A shade near the page's own, so that black and white both leave room for color over them.
function pale([red, green, blue], isDark) {
  const light = 0.299 * red + 0.587 * green + 0.114 * blue;
  return isDark ? 24 + 0.42 * light : 158 + 0.38 * light;
}

function line(context, x, y, width, height) {
  context.moveTo(Math.round(x) + 0.5, Math.round(y) + 0.5);
  context.lineTo(Math.round(x + width) + 0.5, Math.round(y + height) + 0.5);
}
