// Where the page is shown: a browser, or a notebook with a theme of its own.
import { element } from "./dom.js";

const DARK = "(prefers-color-scheme: dark)";

// JupyterLab and Notebook 7; VS Code; Colab; else the system.
export function hostIsDark() {
  const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
  if (jpThemeLight) return jpThemeLight === "false";
  if (vscodeThemeKind) return !vscodeThemeKind.endsWith("light");
  const colab = document.documentElement.getAttribute("theme");
  return colab ? colab === "dark" : matchMedia(DARK).matches;
}

export const themeButton = (told, flip) =>
  element("button", { type: "button", ...told, "aria-label": "Dark mode", onclick: flip }, "◐");

// The state, in the address.
export function writeAddress(entries, way = "replaceState") {
  const hash = new URLSearchParams(entries).toString();
  try {
    history[way](null, "", hash ? `#${hash}` : location.pathname + location.search);
  } catch {
    // A frame without an address of its own: the state is kept in memory.
  }
}

// Calls back when the host's theme changes, until the signal is aborted.
export function watchHost(act, signal) {
  matchMedia(DARK).addEventListener("change", act, { signal });
  const watcher = new MutationObserver(act);
  const options = { attributes: true, attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind", "theme"] };
  watcher.observe(document.body, options);
  watcher.observe(document.documentElement, options);
  signal.addEventListener("abort", () => watcher.disconnect());
}
