// A series: one lane per feature, its line over the relevance of each time step, and its total.
// A row of a table has the same lanes, of one value each.
import { CanvasPanel } from "./canvas_panel.js";
import { brush, clamp, element, range } from "./dom.js";
import { plain, signed, visible } from "./format.js";

const LANES = { least: 16, most: 92, few: 150, table: 26, all: 620 }; // pixels
const GAP = 6;
const FOOT = 22;
const TICKS = 8;
const NUMBER = 56; // room for a number
const CELL = 88; // of a table's value
const NARROW = 520;
const WITH_RANGE = 40; // lanes that have room for the least and the largest value

export class SeriesPanel extends CanvasPanel {
  constructor(page, panel) {
    const { isTable } = page.view.example;
    super(page, panel, { kind: "series", name: isTable ? "Row of a table" : "Series",
      above: element("div", { class: "lanes" },
        element("span", { class: "label", "data-word": isTable ? "cells" : "lanes" }, isTable ? "Value" : "Over time"),
        element("span", { class: "label", "data-word": "total" }, isTable ? "Relevance" : "Total")) });
  }

  update(panel) {
    const { method, pick, against } = panel;
    const { units } = this.example;
    this.totals = this.example.relevance(method, pick, against, units.feature, { share: 0 }).values;
    super.update(panel);
  }

  // The lanes stay as they are drawn; what is pointed at is drawn over them.
  mark() {
    const { context } = brush(this.canvas);
    context.drawImage(this.still, 0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
    if (this.page.pointed >= 0) this.#outline(context, this.page.pointed);
  }

  draw() {
    if (!this.panel) return;
    const room = this.node.getBoundingClientRect().width;
    this.canvas.style.height = "10px";
    const { context: pen } = brush(this.canvas);
    this.#layOut(pen, room);
    this.canvas.style.height = `${this.foot + (this.example.isTable ? 0 : FOOT)}px`;
    const { context } = brush(this.canvas);
    context.textBaseline = "middle";
    const most = Math.max(...this.totals.map(Math.abs)) || 1;
    for (const feature of range(this.example.size[1])) {
      const top = feature * (this.lane + GAP);
      this.#drawName(context, feature, top);
      this.#drawLane(context, feature, top);
      this.#drawTotal(context, feature, top, most);
    }
    if (!this.example.isTable) this.#drawTicks(context);
    this.still = element("canvas", { width: this.canvas.width, height: this.canvas.height });
    this.still.getContext("2d").drawImage(this.canvas, 0, 0);
    this.mark();
  }

  // From left to right: names, lanes, totals.
  #layOut(context, room) {
    const { example, page: { colors } } = this;
    const [, features] = example.size;
    const { isTable } = example;
    const most = features < 3 ? LANES.few : LANES.most;
    this.lane = isTable ? LANES.table : clamp((LANES.all - FOOT) / features - GAP, LANES.least, most);
    this.foot = features * (this.lane + GAP);
    context.font = `12px ${colors.ui}`;
    this.ranges = example.series.map((values) => values.reduce(([low, high], value) =>
      [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]));
    this.hasRanges = this.lane >= WITH_RANGE && !isTable;
    const widths = (texts) => texts.map((text) => context.measureText(text).width);
    const names = widths(example.features.map(visible));
    context.font = `10.5px ${colors.ui}`;
    const least = this.hasRanges ? Math.max(...widths(this.ranges.map(rangeText))) + 14 : 40;
    this.left = clamp(Math.max(...names) + 14, least, Math.max(least, Math.min(0.3 * room, 200)));
    const rest = room - this.left;
    const totals = room < NARROW ? NUMBER : 2 * NUMBER;
    this.width = isTable ? Math.min(CELL, rest / 3) : rest - totals;
    this.totalsAt = this.left + this.width + 10;
    this.room = room;
  }

  #drawName(context, feature, top) {
    const { example, left, lane, hasRanges, page: { colors }, ranges: { [feature]: ends } } = this;
    const middle = top + lane / 2;
    context.textAlign = "right";
    context.font = `12px ${colors.ui}`;
    context.fillStyle = colors.ink;
    const name = withoutMiddle(context, visible(example.features[feature]), left - 12);
    context.fillText(name, left - 10, middle - (hasRanges ? 8 : 0));
    if (!hasRanges) return;
    context.font = `10.5px ${colors.ui}`;
    context.fillStyle = colors.soft;
    context.fillText(rangeText(ends), left - 10, middle + 8);
  }

  #drawLane(context, feature, top) {
    const { left, width, lane, example, page: { colors } } = this;
    context.fillStyle = colors.sunken;
    context.fillRect(left, top, width, lane);
    this.#drawHeat(context, feature, top);
    if (example.isTable) this.#drawValue(context, feature, top);
    else this.#drawLine(context, example.series[feature], this.ranges[feature], top);
  }

  // A column of pixels that stands for several steps has the color of the strongest.
  #drawHeat(context, feature, top) {
    const { left, width, lane, panel: { relevance, limit }, page: { colors } } = this;
    const columns = Math.min(this.example.size[0], Math.max(1, Math.floor(width)));
    for (const column of range(columns)) {
      const part = this.#strongest(feature, column, columns);
      if (part < 0) continue;
      const [from, to] = [column, column + 1].map((k) => Math.round(left + (k * width) / columns));
      context.fillStyle = colors.of(relevance.values[part], limit).css;
      context.fillRect(from, top, to - from, lane);
    }
  }

  // The part with the largest relevance of the steps that one column shows; -1 if none is shown.
  #strongest(feature, column, columns) {
    const { unit, panel: { relevance }, example: { size: [steps, features] } } = this;
    let found = -1;
    const end = Math.ceil(((column + 1) * steps) / columns);
    for (let step = Math.floor((column * steps) / columns); step < end; step++) {
      const part = unit.of[step * features + feature];
      const isLarger = found < 0 || Math.abs(relevance.values[part]) > Math.abs(relevance.values[found]);
      if (isLarger && relevance.has(part)) found = part;
    }
    return found;
  }

  // Dark on a light rim, to be seen on any color.
  #drawLine(context, values, [low, high], top) {
    const { left, width, lane, page: { colors } } = this;
    const inset = Math.min(4, lane / 5);
    const y = (value) => top + inset + (lane - 2 * inset) * (high > low ? (high - value) / (high - low) : 0.5);
    const isDense = values.length > 2 * width;
    context.beginPath();
    if (isDense) {
      // Each pixel has the least and the largest of its values.
      const columns = Math.floor(width);
      for (const column of range(columns)) {
        const near = values.subarray(Math.floor((column * values.length) / columns),
          Math.ceil(((column + 1) * values.length) / columns));
        context.lineTo(left + column + 0.5, y(Math.max(...near)));
        context.lineTo(left + column + 0.5, y(Math.min(...near)));
      }
    } else {
      values.forEach((value, step) => {
        context.lineTo(left + ((step + 0.5) * width) / values.length, y(value));
      });
    }
    context.lineJoin = "round";
    const thin = lane < WITH_RANGE || isDense ? 1 : 1.6;
    for (const [size, color] of [[thin + (isDense ? 1 : 2), colors.paper], [thin, colors.ink]]) {
      context.lineWidth = size;
      context.strokeStyle = color;
      context.stroke();
    }
  }

  #drawValue(context, feature, top) {
    const { left, width, lane, panel: { relevance, limit }, page: { colors } } = this;
    const color = relevance.has(feature) && colors.of(relevance.values[feature], limit).text;
    context.font = `12px ${colors.ui}`;
    context.textAlign = "center";
    context.fillStyle = color || colors.ink;
    const [value] = this.example.series[feature];
    context.fillText(plain(value), left + width / 2, top + lane / 2);
  }

  // The sum of a lane's relevance: a bar from zero, and the number.
  #drawTotal(context, feature, top, most) {
    const { totalsAt: from, room, lane, page: { colors } } = this;
    const value = this.totals[feature];
    const middle = top + lane / 2;
    const across = room - from - NUMBER;
    if (across > 20) {
      const zero = from + across / 2;
      const length = (across / 2) * (value / most);
      const height = Math.min(10, lane - 4);
      context.fillStyle = colors.line;
      context.fillRect(zero - 0.5, top, 1, lane);
      context.fillStyle = colors.side(value);
      context.fillRect(Math.min(zero, zero + length), middle - height / 2, Math.abs(length), height);
    }
    context.font = `11px ${colors.ui}`;
    context.fillStyle = colors.ink;
    context.textAlign = "right";
    context.fillText(signed(value), room - 2, middle);
  }

  #drawTicks(context) {
    const { left, width, foot, page: { colors }, example: { size: [steps] } } = this;
    context.fillStyle = colors.soft;
    context.font = `11px ${colors.ui}`;
    context.textAlign = "right";
    context.fillText("step", left - 10, foot + 8);
    context.textAlign = "center";
    const every = easyNumber(steps / Math.min(TICKS, Math.max(2, width / 60)));
    for (let step = 0; step < steps; step += every) {
      context.fillText(String(step), left + ((step + 0.5) * width) / steps, foot + 8);
    }
  }

  #outline(context, part) {
    const [{ x, y, width, height }] = this.areas(part);
    context.lineWidth = 2;
    context.strokeStyle = this.page.colors.focus;
    const wide = Math.max(4, width);
    context.strokeRect(x + width / 2 - wide / 2, y, wide, height);
  }

  // Where a part is drawn.
  areas(part) {
    const [step, feature] = this.#place(part);
    const { left, width, lane, foot, example: { size: [steps] } } = this;
    const across = step === null ? width : width / steps;
    return [{
      x: left + (step ?? 0) * across,
      y: (feature ?? 0) * (lane + GAP) + 1,
      width: across,
      height: (feature === null ? foot - GAP : lane) - 2,
    }];
  }

  // The time step and the feature of a part, where it has one.
  #place(part) {
    const count = this.example.features.length;
    return {
      value: [Math.floor(part / count), part % count], step: [part, null], feature: [null, part],
    }[this.unit.name];
  }

  // What lies under the pointer; in a column of several steps it is the one that gave the color.
  partAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const [steps, features] = this.example.size;
    const columns = Math.min(steps, Math.max(1, Math.floor(this.width)));
    const share = (event.clientX - box.left - this.left) / this.width;
    const column = clamp(Math.floor(share * columns), 0, columns - 1);
    const feature = clamp(Math.floor((event.clientY - box.top) / (this.lane + GAP)), 0, features - 1);
    const part = this.#strongest(feature, column, columns);
    return part < 0 ? this.unit.of[Math.floor((column * steps) / columns) * features + feature] : part;
  }

  steps(part) {
    const [steps, features] = this.example.size;
    const [step, feature] = this.#place(part).map((index) => index ?? 0);
    const at = (step, feature) =>
      this.unit.of[clamp(step, 0, steps - 1) * features + clamp(feature, 0, features - 1)];
    return {
      ArrowLeft: at(step - 1, feature), ArrowRight: at(step + 1, feature),
      ArrowUp: at(step, feature - 1), ArrowDown: at(step, feature + 1),
    };
  }
}

const rangeText = ([low, high]) => `${plain(low)} to ${plain(high)}`;

// A name with its middle left out, since names often differ at their end.
function withoutMiddle(context, text, most) {
  const signs = [...text];
  const without = (count) => {
    const kept = signs.length - count;
    return `${signs.slice(0, Math.ceil(kept / 2)).join("")}…${signs.slice(signs.length - Math.floor(kept / 2)).join("")}`;
  };
  if (context.measureText(text).width <= most) return text;
  const count = range(signs.length).find((k) => k > 0 && context.measureText(without(k)).width <= most);
  return without(count ?? signs.length - 1);
}

// The next number of steps that is easy to count in: 1, 2, 5, 10, 20, ...
function easyNumber(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}
