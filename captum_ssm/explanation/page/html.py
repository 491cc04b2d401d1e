"""One self-contained HTML file: style, script and data inside, and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from captum_ssm.explanation.page.data import page_data
from captum_ssm.explanation.parts import ExplanationData

# They draw a circuit, and only come with an explanation that has one.
OF_CIRCUITS = (
    *("flow_layout", "flow_words", "flow_picture", "flow_strip"),
    *("flow_curve", "flow_ledger", "flow"),
)
# They show a whole answer, and only come with an explanation that has one of several tokens.
OF_ANSWERS = ("answer_trace", "answer_words", "answer_picture", "answer_picker", "answer")
# They draw images among the words of a text, and only come with an explanation that has some.
OF_PICTURES = ("inset",)
# They draw a report, and only come with one.
OF_REPORTS = ("report_bars", "report_text", "report_cloud", "report_list", "report_parts", "report")
# They draw a report on states, by themselves.
OF_STATES = ("words", "dom", "format", "host", "bars", "controls", "tip", "states")
# In the order in which they are joined: a module comes after those it imports from.
MODULES = (
    *("words", "dom", "format", "host", "flow_graph", "data", "state", "colors", "bars"),
    *("controls", "help", "tip", "examples", "common", "question", "picks", "settings"),
    *OF_CIRCUITS,
    *OF_ANSWERS,
    *("turns", "canvas_panel", "image", *OF_PICTURES, "text", "series", "panels", "reading"),
    *("legend", "sums", "sources", "maps", "lens", "check", "page"),
)

OPEN_PAGE = "openPage(document.body, data, { whole: true });"

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; \
form-action 'none'; style-src '{style_hash}'; script-src '{script_hash}'">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="captum_ssm">
<title>{title}</title>
<style>{style}</style>
</head>
<body class="captum-body">
<noscript>This page draws an explanation by its own script, and scripts are off here.</noscript>
<script type="application/json" id="captum-data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""

_START = """
const data = JSON.parse(document.getElementById("captum-data").textContent);
{}
"""


def page_html(explanation: ExplanationData, size_limit: int = 64 * 2**20) -> str:
    """The page of an explanation: one HTML file that needs no network and no other file.

    The same explanation gives the same page, byte for byte. Texts of the explanation are shown
    and never run: a content security policy allows the page's one script alone.

    Args:
        explanation (Explanation): by :func:`captum_ssm.explain`, or made by hand.
        size_limit (int, optional): of the page, in bytes. Default: 64 MiB

    Returns:
        str: the page. Write it with ``encoding="utf-8"``.

    Raises:
        ValueError: if there is no example or no method, a value is not finite, or the page is
            larger than the limit; the message says which part is largest.

    Examples::

        >>> page = page_html(explain(model, tokenizer, "w3 w4 w5"))
        >>> _ = (folder / "why.html").write_text(page, encoding="utf-8")
    """
    if not explanation.examples or not explanation.methods:
        raise ValueError(
            f"The explanation has {len(explanation.examples)} examples and "
            f"{len(explanation.methods)} methods; a page needs at least one of each."
        )
    data = page_data(explanation)
    extras = extras_of(data)
    page = _document(data, stylesheet(*extras), script(*extras), OPEN_PAGE)
    if len(page) > size_limit:
        raise ValueError(
            f"The page would have {len(page) / 2**20:.1f} MiB, and the limit is "
            f"{size_limit / 2**20:.1f} MiB; {_largest(data)} Leave some of it out, or raise "
            "size_limit."
        )
    return page


def report_html(data: dict[str, Any]) -> str:
    """The page of a report, with the page of an explanation inside for the examples it shows.

    The data are of the format ``captum_ssm.report/1``. Write it with ``encoding="utf-8"``.
    """
    extras = (*extras_of(data["shown"]), True)
    return _document(data, stylesheet(*extras), script(*extras), "openReport(document.body, data);")


def _document(data: dict[str, Any], style: str, code: str, start: str) -> str:
    # Legal in JSON strings alone, so no value changes; and nothing in the data can end its element.
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    code += _START.format(start)
    text = text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
    return _PAGE.format(
        title=html.escape(data["title"]).encode("ascii", "xmlcharrefreplace").decode(),
        style=style,
        script=code,
        data=text,
        style_hash=_hash(style),
        script_hash=_hash(code),
    )


def extras_of(data: dict) -> tuple[bool, bool, bool]:
    """Whether any example of a page's data has a circuit, a whole answer, or images in a text."""
    examples = data["examples"]
    circuits = any(example["circuits"] for example in examples)
    answers, pictures = (
        any(name in example for example in examples) for name in ("whole", "pictures")
    )
    return circuits, answers, pictures


def states_html(data: dict[str, Any]) -> str:
    """The page of a state report, by data of the format ``captum_ssm.states/1``."""
    style = "".join(_read(f"{name}.css") for name in ("page", "report", "states"))
    return _document(data, style, _joined(OF_STATES), "openStates(document.body, data);")


@cache
def stylesheet(
    circuits: bool = True, answers: bool = True, pictures: bool = True, report: bool = False
) -> str:
    """The style, with that of circuits, of whole answers and of reports or without."""
    wanted = {"page": True, "flow": circuits, "answer": answers, "report": report}
    names = [name for name, is_there in wanted.items() if is_there]
    return "".join(_read(f"{name}.css") for name in names)


@cache
def script(
    circuits: bool = True, answers: bool = True, pictures: bool = True, report: bool = False
) -> str:
    """The modules as one: without their imports and exports, which have the same names."""
    groups = {OF_CIRCUITS: circuits, OF_ANSWERS: answers, OF_PICTURES: pictures, OF_REPORTS: report}
    left_out = {name for names, is_there in groups.items() if not is_there for name in names}
    return _joined([name for name in (*MODULES, *OF_REPORTS) if name not in left_out])


def _joined(modules: Sequence[str]) -> str:
    joined = "\n".join(_read(f"{name}.js") for name in modules)
    joined = re.sub(r"^import \{[^}]*\} from [^;]*;\n", "", joined, flags=re.MULTILINE)
    return re.sub(r"^export ", "", joined, flags=re.MULTILINE)


def _read(name: str) -> str:
    return (resources.files("captum_ssm.explanation.page") / "static" / name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _largest(data: dict) -> str:
    """What takes most of a page, and where."""
    parts = {}
    for key in ("maps", "rows", "image"):
        parts[key] = sum(len(json.dumps(example.get(key))) for example in data["examples"])
    key = max(parts, key=lambda key: parts[key])
    what = {"maps": "maps of layers", "rows": "rows of relevance", "image": "images"}[key]
    return f"{what} of {len(data['examples'])} examples take {parts[key] / 2**20:.1f} MiB of it."
