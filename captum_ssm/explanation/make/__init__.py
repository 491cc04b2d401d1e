"""The front door: from a model and a text or an image to an explanation.

:mod:`front` is the function that people call, and :mod:`many` what it and data sets are built on:
how to explain is parsed (:mod:`parse`), and what (:mod:`inputs`; :mod:`pipelines` takes pipelines
apart). :mod:`kinds` tells what a model of texts puts out, and a table in :mod:`asked` leads from
there to the question about each text: the next token (:mod:`texts`), a class or labels of tokens
(:mod:`classes`, by the names of :mod:`labels`), or the part that answers a question
(:mod:`places`). An image has its own (:mod:`images`), and a conversation is rendered by the
tokenizer's chat template (:mod:`messages`, :mod:`templates`). :mod:`generate` writes the answer
where the model is to. Each question computes its example, in steps that are taken for many inputs
together (:mod:`together`): it collects ``Questions`` (:mod:`questions`), which are the answers at
each output and the rows of relevance that explain them (:mod:`rows`; :mod:`captum_methods` for
Captum's own), and :mod:`explained` puts them together. :mod:`run` is how all of these run the
model, and :mod:`validate` removes the tokens that methods rank first. Below are :mod:`reading` (a
text as tokens) and :mod:`lens` (what each layer would answer). :mod:`captum_llm` stands in for
Captum's wrapper of language models. Its prompt and continuation (:mod:`continuation`) are also what
:mod:`trace` follows a whole answer through, for which :mod:`answers` finds the tokens, and the
thoughts before it.
"""

from captum_ssm.explanation.make.front import explain

__all__ = ["explain"]
