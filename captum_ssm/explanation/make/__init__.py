"""The front door: from a model and a text or an image to an explanation.

:mod:`front` parses what it is given (:mod:`parse`) into one ``TextQuestion`` (:mod:`texts`) or
``ImageQuestion`` (:mod:`images`) per example, each with a method that computes its answers. Both
collect ``Questions`` (:mod:`questions`): the answers at each output, and the rows of relevance that
explain them (:mod:`rows`; :mod:`captum_methods` for Captum's own). :mod:`validate` removes the
tokens that methods rank first. A conversation becomes a ``TextQuestion`` by the tokenizer's chat
template (:mod:`messages`, :mod:`templates`), and :mod:`generate` writes the answer where it is not
given. Below are :mod:`reading` (a text as tokens) and :mod:`lens` (what each layer would answer).
:mod:`captum_llm` stands in for Captum's wrapper of language models.
"""

from captum_ssm.explanation.make.front import explain

__all__ = ["explain"]
