// Controls that stay in place while the page changes, so that the keyboard's focus does too.
import { clamp, element, fill, hasModifier, taken } from "./dom.js";
import { term } from "./words.js";

// One of several options. Arrow keys move and choose, as in every group of radio buttons.
export class Choice {
  constructor(key, choose, { kind = "segments", caption = term(key), label = term(key) } = {}) {
    this.choose = choose;
    this.group = element("div", { class: kind, role: "radiogroup", "aria-label": label,
      onkeydown: (event) => this.#move(event) });
    this.caption = caption && element("span", { class: "label", "data-word": key }, caption);
    this.node = element("div", { class: "field" }, this.caption, this.group);
  }

  // Options are {value, content, label, title, word, className, isDisabled}; a word is explained.
  show(options, value) {
    const focused = this.group.contains(document.activeElement);
    fill(this.group, options.map((option) => element("button", {
      type: "button",
      role: "radio",
      class: option.className,
      "aria-checked": String(option.value === value),
      "aria-disabled": option.isDisabled && "true",
      "aria-label": option.label,
      tabindex: option.value === value ? 0 : -1,
      "data-tip": option.title,
      "data-word": option.word,
      "data-value": option.value,
      onclick: (event) => option.isDisabled || this.choose(option.value, event),
    }, option.content)));
    if (focused) this.checked?.focus({ preventScroll: true });
  }

  get buttons() {
    return [...this.group.children];
  }

  get checked() {
    return this.buttons.find((button) => button.ariaChecked === "true");
  }

  #move(event) {
    const at = this.buttons.indexOf(event.target);
    const last = this.buttons.length - 1;
    const to = {
      ArrowLeft: at - 1, ArrowUp: at - 1, ArrowRight: at + 1, ArrowDown: at + 1, Home: 0, End: last,
    }[event.key];
    if (to === undefined || at < 0 || hasModifier(event)) return;
    taken(event);
    const button = this.buttons[clamp(to, 0, last)];
    button.focus();
    button.click();
  }
}

// A slider over a few values, which are not evenly spaced.
export class Slider {
  constructor(key, values, describe, choose) {
    Object.assign(this, { values, describe });
    this.input = element("input", { type: "range", min: 0, max: values.length - 1, step: 1,
      "aria-label": term(key), oninput: (event) => choose(values[event.target.value]) });
    this.output = element("output");
    this.node = element("label", { class: "slider", "data-word": key },
      element("span", {}, term(key)), this.input, this.output);
  }

  show(value) {
    this.input.value = this.values.indexOf(value);
    this.output.textContent = this.describe(value);
    this.input.setAttribute("aria-valuetext", this.describe(value));
  }
}

export class Toggle {
  constructor(key, choose) {
    this.input = element("input", { type: "checkbox", onchange: () => choose(this.input.checked) });
    this.node = element("label", { class: "toggle", "data-word": key }, this.input, term(key));
  }

  show(value) {
    this.input.checked = value;
  }
}
