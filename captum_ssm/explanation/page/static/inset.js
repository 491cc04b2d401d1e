// An image among the words of a text, with the relevance of its tokens over it; of a sound, and where
// the places of tokens are not known, a strip of them.
import { brush, clamp, element, raster } from "./dom.js";
import { percent, signed, visible } from "./format.js";
import { colored, drawGrid, framePart, grayed } from "./image.js";

const INSET_WIDEST = 440;
const INSET_TALLEST = { one: 360, all: 190, pair: 220 };
const INSET_STRIP = 34;

export class Inset {
  constructor(page, picture, unit) {
    Object.assign(this, { page, picture, unit });
    this.canvas = element("canvas", { class: "picture", role: "img" });
    this.canvas.inset = this;
    this.name = element("strong", {}, visible(picture.name));
    this.told = element("span", { class: "quiet" });
    this.shown = picture.pixels && !picture.isGrid && element("canvas", { class: "picture plain" });
    this.node = element("figure", { class: "inset" },
      this.shown, this.canvas,
      element("figcaption", {}, this.name, " ", this.told,
        picture.note && element("span", { class: "quiet note" }, visible(picture.note))));
    this.parts = [...new Set(picture.tokens.map((token) => unit.of[token]))];
    this.image = picture.pixels && colored(picture.pixels);
  }

  update(panel) {
    this.panel = panel;
    const { page, picture, unit, parts } = this;
    const { relevance, limit } = panel;
    if (picture.pixels && this.theme !== page.theme) {
      this.gray = grayed(picture.pixels, page.theme === "dark");
      this.theme = page.theme;
    }
    this.overlay = raster(picture.columns, picture.rows, (cell) => {
      const part = unit.of[picture.tokens[cell]];
      return relevance.has(part) ? page.colors.over(relevance.values[part], limit) : [0, 0, 0, 0];
    });
    const { share, sum } = relevance.of(parts);
    const isUnread = parts.every((part) => part > relevance.read);
    this.told.textContent = isUnread ? "not read" : `${percent(share)} · ${signed(sum)}`;
    this.canvas.setAttribute("aria-label", `${visible(picture.name)}: ${this.told.textContent}`);
    this.draw();
  }

  draw() {
    if (!this.panel) return;
    this.#layOut();
    const { page, picture, image } = this;
    const { values } = page.state;
    const { context, width, height } = brush(this.canvas);
    if (!width) return;
    const back = values.gray ? this.gray : image;
    if (picture.isGrid && back) {
      context.imageSmoothingEnabled = width < 2 * back.width;
      context.drawImage(back, 0, 0, width, height);
      context.globalAlpha = values.opacity / 100;
    }
    context.imageSmoothingEnabled = false;
    context.drawImage(this.overlay, 0, 0, width, height);
    context.globalAlpha = 1;
    if (picture.isGrid && values.grid) drawGrid(context, [0, 0, width, height], picture.rows, picture.columns);
    const box = page.pointed >= 0 && this.#box(page.pointed);
    if (box) framePart(context, box, page.colors.focus);
    if (!this.shown) return;
    const plain = brush(this.shown); // what is given beside a strip, as it is
    plain.context.drawImage(image, 0, 0, plain.width, plain.height);
  }

  #layOut() {
    const { picture, image, canvas } = this;
    const room = Math.min(INSET_WIDEST, this.node.parentElement?.clientWidth ?? INSET_WIDEST);
    const [across, down] = image ? [image.width, image.height] : [picture.columns, picture.rows];
    const width = Math.min(room, (INSET_TALLEST[this.page.state.values.view] * across) / down);
    const size = (node, wide, tall) => {
      node.style.width = `${wide}px`;
      node.style.height = `${tall}px`;
    };
    if (picture.isGrid) size(canvas, width, (width * down) / across);
    else size(canvas, room, INSET_STRIP);
    if (this.shown) size(this.shown, width / 2, (width * down) / across / 2);
  }

  // The box around all cells of a part, which are neighbors; there are several where units are larger than tokens.
  #box(part) {
    const { picture, unit } = this;
    const { width, height } = this.canvas.getBoundingClientRect();
    const [across, down] = [width / picture.columns, height / picture.rows];
    const cells = picture.tokens.flatMap((token, cell) => (unit.of[token] === part
      ? [[cell % picture.columns, Math.floor(cell / picture.columns)]] : []));
    if (!cells.length) return null;
    const [[left, right], [top, bottom]] = [0, 1].map((axis) => cells.map((cell) => cell[axis]))
      .map((along) => [Math.min(...along), Math.max(...along) + 1]);
    return { x: left * across, y: top * down, width: (right - left) * across, height: (bottom - top) * down };
  }

  anchor(part) {
    const box = this.#box(part);
    const { x, y } = this.canvas.getBoundingClientRect();
    return box && new DOMRect(x + box.x, y + box.y, box.width, box.height);
  }

  partAt({ clientX, clientY }) {
    const { picture, unit } = this;
    const { left, top, width, height } = this.canvas.getBoundingClientRect();
    const column = clamp(Math.floor(((clientX - left) / width) * picture.columns), 0, picture.columns - 1);
    const row = clamp(Math.floor(((clientY - top) / height) * picture.rows), 0, picture.rows - 1);
    return unit.of[picture.tokens[row * picture.columns + column]];
  }

  // Where a part lies in the picture, for a cut-out of it; null where that is not known.
  crop(part) {
    if (!this.image || !this.picture.isGrid) return null;
    const box = this.#box(part);
    const { width, height } = this.canvas.getBoundingClientRect();
    if (!box || !width) return null;
    const [across, down] = [this.image.width / width, this.image.height / height];
    return { picture: this.image, source: [box.x * across, box.y * down, box.width * across, box.height * down] };
  }
}
