// Numbers and tokens as readers want them.
import { clamp, element } from "./dom.js";

const MINUS = "−";

// Three digits, whatever the magnitude.
export function digits(value) {
  const size = Number(Math.abs(value).toPrecision(3));
  if (size === 0) return "0";
  if (size < 1e-3) return size.toExponential(1).replace("-", MINUS);
  if (size >= 1e5) return size.toExponential(1).replace("+", "");
  return size.toFixed(clamp(2 - Math.floor(Math.log10(size)), 0, 4));
}

export function signed(value) {
  return (value > 0 ? "+" : value < 0 ? MINUS : "") + digits(value);
}

export function plain(value) {
  return (value < 0 ? MINUS : "") + digits(value);
}

export function percent(share) {
  if (share === 0) return "0%";
  if (share < 1e-3) return "<0.1%";
  if (share < 0.0995 || (share > 0.99 && share < 0.9995)) return `${(100 * share).toFixed(1)}%`;
  return `${Math.round(100 * share)}%`;
}

// How likely an answer is; of a forecast, which is a number and not one of several, that number.
export function likely({ p, logit }) {
  return p === null ? plain(logit) : percent(p);
}

// Several names as one: "a, b and c".
export function listed(names) {
  return names.length < 2 ? names.join() : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}

export function count(number, noun) {
  const plural = noun.endsWith("ch") ? `${noun}es` : `${noun}s`;
  return `${number.toLocaleString("en")} ${number === 1 ? noun : plural}`;
}

// Characters that have no shape of their own, or that turn the text around them.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}\p{Cs}]/gu;
const JOINERS = /[\u200c\u200d]/; // part of emoji and of several scripts
const SIGNS = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" };

export function visible(text) {
  return text.replace(UNSEEN, (sign) => {
    if (JOINERS.test(sign)) return sign;
    return `⟨${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

// A part of a running text: the space before it, what carries the color, and what follows.
export function cut(text) {
  const [, before, body, after] = /^( *)([^]*?)( *)$/.exec(text);
  if (body.trim()) {
    // Line breaks inside stay line breaks, and are seen.
    return { before, body: visible(body.replaceAll("\n", "⏎")), after: after + breaks(text) };
  }
  const signs = [...text].map((sign) => SIGNS[sign] ?? visible(sign)).join("");
  return { before: "", body: signs || "∅", after: breaks(text) };
}

const breaks = (text) => "\n".repeat(text.split("\n").length - 1);

// A token outside of its text, as a name.
export function name(text) {
  const body = text.trim();
  return body ? visible(body.replaceAll("\n", "⏎")) : cut(text).body;
}

export function token(text) {
  return element("bdi", { class: "token" }, name(text));
}

export function quoted(text) {
  return ["“", token(text), "”"];
}

// A text that is cut in the middle, at words.
export function abridged(text, most) {
  const all = text.trim().replace(/\s+/g, " ");
  if (all.length <= most) return all;
  const head = all.slice(0, Math.ceil(most * 0.6)).replace(/\s\S*$/, "");
  const tail = all.slice(all.length - Math.floor(most * 0.35)).replace(/^\S*\s/, "");
  return `${head} … ${tail}`;
}
