"""Formulas as MathML, which browsers draw themselves: without a network, and without a script."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

logger = logging.getLogger(__name__)


def mathml(node, display):
    found = convert(node.astext(), display=display)
    if "\\" in found:
        logger.warning("latex2mathml does not know all of %s", node.astext(), location=node)
    return found


def inline(translator, node):
    translator.body.append(f'<span class="formula">{mathml(node, "inline")}</span>')
    raise nodes.SkipNode


def block(translator, node):
    translator.body.append(f'<div class="formula">{mathml(node, "block")}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer(
        "mathml", inline_renderers=(inline, None), block_renderers=(block, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
