// Elements and canvases. Text from the data becomes text nodes: it is shown, never run.

export const element = (tag, properties = {}, ...children) =>
  dressed(document.createElement(tag), properties, children);

// Parts of a drawing, made as elements are.
export const svg = (tag, properties = {}, ...children) =>
  dressed(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);

function dressed(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, value);
    }
  }
  node.append(...present(children));
  return node;
}

// Children may be nested lists, and conditions that came out false.
function present(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== false);
}

export function fill(node, ...children) {
  node.replaceChildren(...present(children));
}

// The head and the body of a table; a column without a name has an empty cell there.
export const tableParts = (heads, rows) => [
  element("thead", {}, element("tr", {},
    heads.map((head) => (head ? element("th", { scope: "col" }, head) : element("td"))))),
  element("tbody", {}, rows),
];
export const tableRow = (cells, properties = {}) =>
  element("tr", properties, cells.map((cell) => element("td", {}, cell)));

export const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
export const added = (list, of = (x) => x) => list.reduce((sum, item) => sum + of(item), 0);
export const range = (count) => Array.from({ length: count }, (_, k) => k);
export const hasModifier = (event) => event.ctrlKey || event.metaKey || event.altKey;

// What was pressed is for this handler alone.
export function taken(event) {
  event.preventDefault();
  event.stopPropagation();
}

// A canvas of the size at which it is laid out, and its context in CSS pixels.
export function brush(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const density = devicePixelRatio || 1;
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  const context = canvas.getContext("2d");
  context.scale(density, density);
  return { context, width, height };
}

// One pixel for each cell of a grid; `colorAt(cell)` is [red, green, blue, opacity], 0 to 255.
export function raster(columns, rows, colorAt) {
  const canvas = element("canvas", { width: columns, height: rows });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(columns, rows);
  for (let cell = 0; cell < columns * rows; cell++) pixels.data.set(colorAt(cell), 4 * cell);
  context.putImageData(pixels, 0, 0);
  return canvas;
}

// Scroll a row so that this child is in its middle, without moving the page.
export function center(node) {
  const row = node?.parentElement;
  if (!row) return;
  row.scrollLeft = node.offsetLeft - row.offsetLeft - (row.clientWidth - node.offsetWidth) / 2;
  row.scrollTop = node.offsetTop - row.offsetTop - (row.clientHeight - node.offsetHeight) / 2;
}
