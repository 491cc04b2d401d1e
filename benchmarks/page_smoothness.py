"""How smooth is the page of a long text? Frames while it scrolls, and the time of a click.

A page is opened in headless Chromium without a GPU. The text scrolls by 40 pixels per frame for
as many frames as asked for; a click on an output is timed to the end of the next frame. On a busy
machine frames wait for a processor: "work per frame" is the time that the page's own thread ran,
and a frame of a 60th of a second has room for 16 ms of it.

    python benchmarks/page_smoothness.py
    python benchmarks/page_smoothness.py --tokens 1000 10000 30000
    python benchmarks/page_smoothness.py --tokens 5000 --answer 1000

With ``--answer``, the last tokens are a whole answer, which one row and its hops explain, and a
click is a step from hop to hop; with ``--rows`` as well, each of its tokens has a row, and the page
computes the hops itself.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from playwright.sync_api import CDPSession, sync_playwright

from captum_ssm.explanation import Explanation
from captum_ssm.explanation.page import page_html

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import pages
import whole_answers

SCROLL = """async (frames) => {
    const text = document.querySelector(".text");
    const frame = () => new Promise(requestAnimationFrame);
    const times = [];
    text.scrollTop = 0;
    await frame();
    for (let k = 0; k < frames; k++) {
        text.scrollTop += 40;
        times.push(await frame());
    }
    return times.slice(1).map((time, k) => time - times[k]);
}"""
CLICK = """async ([options, number]) => {
    const all = document.querySelectorAll(options);
    const chip = all[number % all.length];
    const start = performance.now();
    chip.click();
    const script = performance.now() - start;
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    return [script, performance.now() - start];
}"""
OPENED = """async () => {
    while (!document.querySelector(".part")) await new Promise((done) => setTimeout(done, 5));
    return performance.now();
}"""
COLUMNS = (
    *("tokens", "page", "opened", "click: script", "click: frame"),
    *("frames/s", "95% of frames within", "work per frame"),
)


def busy(session: CDPSession) -> float:
    """Seconds that the page's main thread has run so far."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def made(tokens: int, args: argparse.Namespace) -> Explanation:
    """What is shown: a text whose tokens are explained, or one with a whole answer."""
    if not args.answer:
        return pages.long(tokens)
    long = whole_answers.long_rows if args.rows else whole_answers.long
    return whole_answers.explained(long(tokens - args.answer, args.answer))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--answer", type=int, default=0)
    parser.add_argument("--rows", action="store_true")
    args = parser.parse_args()
    options = "[aria-label=Steps] button" if args.answer else ".chips button"
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("There is no chromium on the path; expected Debian's package chromium.")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium)
        for tokens in args.tokens:
            path = Path(folder) / f"{tokens}.html"
            path.write_text(page_html(made(tokens, args)), "utf-8")
            page = browser.new_page(viewport={"width": 1240, "height": 900})
            page.goto(path.as_uri())
            opened = page.evaluate(OPENED)
            page.wait_for_timeout(1000)
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            before = busy(session)
            frames = page.evaluate(SCROLL, args.frames)
            work = (busy(session) - before) / args.frames
            clicks = [page.evaluate(CLICK, [options, k % 7]) for k in range(1, 12)]
            script, frame = (median(times) for times in zip(*clicks, strict=True))
            print(
                f"| {tokens} | {path.stat().st_size / 2**20:.2f} MiB | {opened:.0f} ms "
                f"| {script:.0f} ms | {frame:.0f} ms | {1000 / np.mean(frames):.0f} "
                f"| {np.percentile(frames, 95):.0f} ms | {1000 * work:.1f} ms |"
            )
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
