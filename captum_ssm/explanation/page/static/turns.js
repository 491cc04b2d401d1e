// Who says what: a label where each turn of a conversation begins, or each part of a whole answer, with
// its share.
import { element, fill } from "./dom.js";
import { percent, visible } from "./format.js";

export class Turns {
  constructor({ view: { example, unit } }) {
    Object.assign(this, { example, unit });
    this.labels = new Map();
    for (const [name, first, end] of labeled(example)) {
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

// Turns, the last of which may be reasoning and an answer; without a conversation, the prompt and these.
function labeled({ turns, whole, prompt }) {
  const said = turns?.names.map((name, k) => [name, ...turns.bounds[k]]) ?? [];
  const regions = whole?.regions.map(({ name, first, end }) => [name, first, end]) ?? [];
  if (!turns) return regions;
  return regions.length < 3 ? said : [...said.filter(([, first]) => first < prompt), ...regions.slice(1)];
}
