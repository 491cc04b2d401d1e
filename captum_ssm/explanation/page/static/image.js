// A picture, or the frames of a video, with relevance over it: patches or pixels.
import { CanvasPanel } from "./canvas_panel.js";
import { brush, clamp, range, raster } from "./dom.js";

const WIDEST = 720;
const TALLEST = 620;
const BETWEEN = 8; // frames
const NUMBERED = 40; // pixels of a frame that has room for its number

export class ImagePanel extends CanvasPanel {
  constructor(page, panel) {
    super(page, panel, { kind: "picture", name: page.view.example.frames > 1 ? "Video" : "Picture" });
    this.picture = colored(this.example.pixels);
  }

  update(panel) {
    const { relevance, limit } = panel;
    const { slices, rows, columns } = this.unit;
    if (this.grayTheme !== this.page.theme) {
      this.gray = grayed(this.example.pixels, this.page.theme === "dark");
      this.grayTheme = this.page.theme;
    }
    this.overlay = raster(columns, slices * rows, (part) =>
      relevance.has(part) ? this.page.colors.over(relevance.values[part], limit) : [0, 0, 0, 0]);
    super.update(panel);
  }

  mark() {
    this.draw();
  }

  // Where a part lies in the picture, whose frames lie one below the other.
  source(part) {
    const { frames } = this.example;
    const { slices, rows, columns } = this.unit;
    const { slice, row, column } = this.#place(part);
    const [across, down] = [this.picture.width / columns, this.picture.height / frames / rows];
    const frame = Math.floor((slice * frames) / slices);
    return [column * across, (frame * rows + row) * down, across, down];
  }

  crop(part) {
    return { picture: this.picture, source: this.source(part) };
  }

  draw() {
    if (!this.panel) return;
    const { frames, grid } = this.example;
    const { slices, rows, columns } = this.unit;
    this.#layOut();
    const { context } = brush(this.canvas);
    const { values } = this.page.state;
    const picture = values.gray ? this.gray : this.picture;
    const down = picture.height / frames;
    for (const frame of range(frames)) {
      const { x, y } = this.#corner(frame);
      const { width, height } = this.frame;
      context.imageSmoothingEnabled = width < 2 * picture.width;
      context.drawImage(picture, 0, frame * down, picture.width, down, x, y, width, height);
      context.globalAlpha = values.opacity / 100;
      context.imageSmoothingEnabled = false;
      const slice = Math.floor((frame * slices) / frames);
      context.drawImage(this.overlay, 0, slice * rows, columns, rows, x, y, width, height);
      context.globalAlpha = 1;
      if (grid && values.grid) drawGrid(context, [x, y, width, height], grid[1], grid[2]);
      if (frames > 1) this.#drawNumber(context, frame, x, y);
    }
    const { pointed, colors } = this.page;
    for (const area of pointed < 0 ? [] : this.areas(pointed)) framePart(context, area, colors.focus);
  }

  // Frames in as many columns as make them largest.
  #layOut() {
    const { frames } = this.example;
    const [across, down] = [this.picture.width, this.picture.height / frames];
    const room = Math.min(this.node.getBoundingClientRect().width, WIDEST);
    const widths = range(frames).map((k) => {
      const [columns, rows] = [k + 1, Math.ceil(frames / (k + 1))];
      const [wide, tall] = [room - k * BETWEEN, TALLEST - (rows - 1) * BETWEEN];
      return Math.min(wide / columns, (tall / rows) * (across / down));
    });
    const width = Math.max(...widths);
    this.columns = widths.indexOf(width) + 1;
    this.frame = { width, height: (width * down) / across };
    const count = Math.ceil(frames / this.columns);
    const side = (length, number) => length * number + BETWEEN * (number - 1);
    this.canvas.style.width = `${side(width, Math.min(frames, this.columns))}px`;
    this.canvas.style.height = `${side(this.frame.height, count)}px`;
  }

  #corner(frame) {
    const { columns, frame: { width, height } } = this;
    return {
      x: (frame % columns) * (width + BETWEEN),
      y: Math.floor(frame / columns) * (height + BETWEEN),
    };
  }

  #drawNumber(context, frame, x, y) {
    if (this.frame.width < NUMBERED) return;
    const { colors } = this.page;
    context.font = `11px ${colors.ui}`;
    context.textBaseline = "top";
    context.textAlign = "left";
    context.fillStyle = colors.paper;
    context.fillRect(x, y, context.measureText(String(frame)).width + 8, 16);
    context.fillStyle = colors.ink;
    context.fillText(String(frame), x + 4, y + 3);
  }

  #place(part) {
    const { rows, columns } = this.unit;
    const slice = Math.floor(part / (rows * columns));
    return { slice, row: Math.floor(part / columns) % rows, column: part % columns };
  }

  // Where a part is drawn: once in each of its frames.
  areas(part) {
    const { slices, rows, columns } = this.unit;
    const { frames } = this.example;
    const { slice, row, column } = this.#place(part);
    const [width, height] = [this.frame.width / columns, this.frame.height / rows];
    return range(frames).filter((frame) => Math.floor((frame * slices) / frames) === slice)
      .map((frame) => {
        const { x, y } = this.#corner(frame);
        return { x: x + column * width, y: y + row * height, width, height };
      });
  }

  partAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const { slices, rows, columns } = this.unit;
    const { frames } = this.example;
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const { width, height } = this.frame;
    const across = clamp(Math.floor(x / (width + BETWEEN)), 0, this.columns - 1);
    const down = Math.max(0, Math.floor(y / (height + BETWEEN)));
    const frame = clamp(down * this.columns + across, 0, frames - 1);
    const corner = this.#corner(frame);
    const row = clamp(Math.floor(((y - corner.y) / height) * rows), 0, rows - 1);
    const column = clamp(Math.floor(((x - corner.x) / width) * columns), 0, columns - 1);
    const slice = Math.floor((frame * slices) / frames);
    return (slice * rows + row) * columns + column;
  }

  steps(at) {
    const { columns, rows: inSlice, slices } = this.unit;
    const [row, column] = [Math.floor(at / columns), at % columns];
    const move = (down, right) =>
      clamp(row + down, 0, slices * inSlice - 1) * columns + clamp(column + right, 0, columns - 1);
    return {
      ArrowLeft: move(0, -1), ArrowRight: move(0, 1), ArrowUp: move(-1, 0), ArrowDown: move(1, 0),
      PageUp: move(-inSlice, 0), PageDown: move(inSlice, 0),
    };
  }
}

// A picture in its own colors.
export function colored({ size: [height, width], data }) {
  return raster(width, height, (pixel) => [...data.subarray(3 * pixel, 3 * pixel + 3), 255]);
}

// A picture in gray, on which all color is relevance.
export function grayed({ size: [height, width], data }, isDark) {
  return raster(width, height, (pixel) => {
    const shade = pale(data.subarray(3 * pixel, 3 * pixel + 3), isDark);
    return [shade, shade, shade, 255];
  });
}

// The lines between patches: dark and light, to be seen on any picture.
export function drawGrid(context, [left, top, width, height], rows, columns) {
  context.beginPath();
  for (let k = 1; k < columns; k++) line(context, left + (k * width) / columns, top, 0, height);
  for (let k = 1; k < rows; k++) line(context, left, top + (k * height) / rows, width, 0);
  context.lineWidth = 1;
  context.strokeStyle = "rgb(255 255 255 / 30%)";
  context.stroke();
  context.setLineDash([2, 2]);
  context.strokeStyle = "rgb(0 0 0 / 30%)";
  context.stroke();
  context.setLineDash([]);
}

// The frame of the part that is pointed at.
export function framePart(context, { x, y, width, height }, color) {
  context.lineWidth = 4;
  context.strokeStyle = "#fff";
  context.strokeRect(x, y, width, height);
  context.lineWidth = 2;
  context.strokeStyle = color;
  context.strokeRect(x, y, width, height);
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
