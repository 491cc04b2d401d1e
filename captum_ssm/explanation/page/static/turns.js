// Who says what in a conversation: a label where each turn begins, with its share.
import { element, fill } from "./dom.js";
import { percent, visible } from "./format.js";

export class Turns {
  constructor({ view: { example, unit } }) {
    Object.assign(this, { example, unit });
    this.labels = new Map();
    const { turns } = example;
    for (const [k, name] of turns ? turns.names.entries() : []) {
      const [first, end] = turns.bounds[k];
      const share = element("span");
      const node = element("span", { class: "turn", "data-word": "turn" }, `${visible(name)} `, share);
      if (!example.isTemplate(first)) this.labels.set(unit.of[first], { node, share, end });
    }
  }

  label(part) {
    return this.labels.get(part)?.node ?? null;
  }

  isTemplate(part) {
    return this.example.isTemplate(this.unit.bounds[part][0]);
  }

  update(relevance) {
    for (const [part, { share, end }] of this.labels) {
      let sum = 0;
      for (let k = part; k <= this.unit.of[end - 1]; k++) {
        if (k <= relevance.read && !relevance.hidden.has(k)) sum += relevance.share(k);
      }
      fill(share, part <= relevance.read ? percent(sum) : "");
    }
  }
}
