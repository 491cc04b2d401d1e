// A circuit in words: which token decides, by which layers, and what a node or an edge is.
import { element } from "./dom.js";
import { largestHead } from "./flow_graph.js";
import { name, percent, signed } from "./format.js";

const MUCH = 0.2; // of the score: a token that gives so much decides
const MOST_SIGNS = 40;
export const PARTS = ["residual stream", "own token in the mixer", "gate", "MLP and the rest"];

export function clipped(text, most = MOST_SIGNS) {
  const signs = [...name(text)];
  return signs.length > most ? `${signs.slice(0, most - 1).join("")}…` : name(text);
}

export const layersNamed = (first, last) => (first === last ? `layer ${first}` : `layers ${first}–${last}`);
export const shareOf = (part, whole) => (part < 0 ? `−${percent(-part / whole)}` : percent(part / whole));
const clippedToken = (text) => element("bdi", { class: "token" }, clipped(text));

// A token with its position, since a text may hold it twice.
function wordAt({ tokens }, t, kind = "") {
  return element("span", { class: `numbered ${kind}` }, "“", clippedToken(tokens[t]), "”", element("small", {}, t));
}

function layerNamed({ layers, isHybrid }, layer) {
  const isAttention = isHybrid && layers[layer].kind !== "recurrence";
  return `${isAttention ? `${layers[layer].kind} ` : ""}layer ${layer}`;
}

// How much a path's token has to say: a verb, in the sentence and below its name.
export function verdictOf(graph, path) {
  if (path.share >= MUCH) return "decides";
  return graph.paths.some(({ start, share }) => start !== graph.at && share > path.share) ? "gives a part" : "gives most";
}

export function pathSentence(graph, path) {
  const reads = path.steps.filter(({ id }) => id);
  const much = [element("b", {}, `${percent(path.share)} of the score`)];
  if (!reads.length) {
    return [wordAt(graph, path.start, "first"), " keeps its own through all layers: ", much, "."];
  }
  const steps = reads.map(({ to, layer, kind }, n) => [
    n === 0 ? ": " : n === reads.length - 1 ? ", and " : ", ", wordAt(graph, to),
    kind === "shift" ? ` is given ${n ? "that" : "it"} by the token shift of ` : ` reads ${n ? "that" : "it"} in `,
    element("b", {}, layerNamed(graph, layer)),
  ]);
  return [wordAt(graph, path.start, "first"), ` ${verdictOf(graph, path)}`, steps, ". ", much, " goes this way."];
}

// A path in a line: its tokens, and the layers that move it.
export function pathLine(graph, path) {
  const reads = path.steps.filter(({ id }) => id);
  const small = (text) => element("small", {}, text);
  const of = (t) => [clippedToken(graph.tokens[t]), small(` ${t}`)];
  const layers = [...new Set(reads.map(({ layer }) => layer))];
  const how = !reads.length ? "keeps its own" : `layer${layers.length > 1 ? "s" : ""} ${layers.join(", ")}`;
  return [of(path.start), reads.map(({ to }) => [small(" → "), of(to)]), small(` · ${how}`)];
}

export function flowTitle(graph, thing) {
  const { stage, kind, layer, end, source, target } = thing;
  const of = ({ token }) => wordAt(graph, token);
  if (!source) {
    return [of(thing), stage === 0 ? ", as it is read" : stage === graph.depth ? ", where the answer is read"
      : `, after layer ${stage - 1}`];
  }
  if (kind === "stay") return [of(source), ` stays in ${layersNamed(layer, end - 1)}`];
  return [of(target), " reads ", of(source), kind === "shift" ? `, by the token shift of layer ${layer}`
    : ` in ${layerNamed(graph, layer)}`];
}

// A screen reader says it in these words.
export function flowAloud(graph, thing) {
  const { stage, kind, layer, end, source, target, value } = thing;
  const of = ({ token }) => `${clipped(graph.tokens[token])}, token ${token},`;
  const title = !source ? `${of(thing)} ${stage === 0 ? "as it is read" : `after layer ${stage - 1}`}`
    : kind === "stay" ? `${of(source)} stays in ${layersNamed(layer, end - 1)}`
      : `${of(target)} reads ${of(source)} ${kind === "shift" ? "by the token shift of" : "in"} layer ${layer}`;
  const head = largestHead(thing);
  return `${title}: ${signed(value)}, ${shareOf(value, graph.score.value)} of the score${head && `, ${head}`}`;
}
