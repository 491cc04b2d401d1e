// Pages of explain() in frames are light or dark as this page is. Each looks at an attribute of its document.
const frames = () => document.querySelectorAll("iframe");

function follow(frame) {
  const { documentElement: inside } = frame.contentDocument ?? {}; // none where pages are opened as files
  inside?.setAttribute("theme", document.documentElement.dataset.theme);
}

addEventListener("DOMContentLoaded", () => {
  for (const frame of frames()) {
    frame.addEventListener("load", () => follow(frame));
    follow(frame);
  }
  new MutationObserver(() => frames().forEach(follow)).observe(document.documentElement, {
    attributes: true,
    attributeFilter: ["data-theme"],
  });
});
