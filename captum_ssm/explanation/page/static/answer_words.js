// What a span of the answer rests on, as a sentence.
import { added, element } from "./dom.js";
import { percent, quoted, abridged } from "./format.js";

const QUOTED_LETTERS = 64; // letters of a quoted sentence
const HARDLY = 0.005;
const WORTH_SAYING = 0.05;

const strong = (share) => element("b", {}, percent(share));

// What is explained, as one names it.
export function spanName(whole, [first, end]) {
  const named = whole.named.find(({ span }) => span[0] === first && span[1] === end);
  return named ? named.name : end - first === 1 ? "token" : "part";
}

// The sentence, of a hop: contents for an element.
export function restsOn(trace, hop, what) {
  return [...shares(trace, hop, what), measured(trace)];
}

function shares(trace, hop, what) {
  const [prompt, ...others] = trace.shares(hop);
  const own = added(others, ({ share }) => share);
  const parts = new Parts(trace, hop);
  if (hop === "all") return followed(prompt, own, parts, what);
  const start = hop === "0" ? null
    : [strong(trace.reached[hop]), ` of this ${what} came through the model’s own words. `];
  const [of, rests, words] = hop === "0" ? [`of this ${what}`, "rests on", "the model’s own words"]
    : ["of that", "goes back to", "earlier words of its own"];
  if (own < HARDLY) return [start, `All ${of} ${rests} the prompt`, parts.most(prompt), "."];
  if (prompt.share < HARDLY) return [start, `All ${of} ${rests} ${words}`, parts.mostOf(others), ".", unfollowed(trace)];
  return [start, strong(prompt.share), ` ${of} ${rests} the prompt`, parts.most(prompt), "; ", strong(own),
    ` ${rests} ${words}`, parts.mostOf(others), ".", unfollowed(trace)];
}

// What says on which of its own words the model rests, where that is not relevance everywhere.
function measured({ bySwaps, whole, hops }) {
  if (bySwaps) return " What rests on its own words was measured by swapping them.";
  const isOther = hops.length > 1 && whole.given.some((one) => one.bySwaps);
  return isOther ? " Its own words are followed by relevance here: they were swapped for another part of the answer alone." : null;
}

function followed(prompt, own, parts, what) {
  return ["Followed back through its own words, ", strong(prompt.share), ` of this ${what} rests on the prompt`,
    parts.most(prompt, 2), own < HARDLY ? "." : ["; ", strong(own), " stays on own words, not followed further."]];
}

function unfollowed({ hops, handedOn }) {
  return hops.length > 1 || handedOn[0] < WORTH_SAYING ? ""
    : " These were not explained themselves: explain(…, hops=3) follows them back.";
}

// The parts of the text with the largest shares of a hop, in words.
class Parts {
  constructor(trace, hop) {
    this.isBack = hop !== "0" && hop !== "all";
    Object.assign(this, { trace, unit: trace.unit, shares: trace.partsOf(hop) });
  }

  most(region, count = 1) {
    return this.mostOf([region], count);
  }

  mostOf(regions, count = 1) {
    const { bounds } = this.unit;
    const isIn = (part) => regions.some(({ first, end }) => first <= bounds[part][0] && bounds[part][0] < end);
    const parts = [...this.shares.keys()].filter((part) => isIn(part) && this.shares[part]);
    if (parts.length < 2) return null;
    parts.sort((a, b) => Math.abs(this.shares[b]) - Math.abs(this.shares[a]));
    const told = parts.slice(0, count).map((part, k) => [k > 0 && " and ", this.#told(part)]);
    return [`, most ${this.isBack ? "to" : "on"} `, told];
  }

  #told(part) {
    const share = this.shares[part];
    const text = abridged(this.trace.example.partText(this.unit, part), QUOTED_LETTERS);
    return [quoted(text), ` (${percent(Math.abs(share))}${share < 0 ? ", against it" : ""})`];
  }
}
