"""The front door: from a model and a text or an image to an explanation.

:mod:`front` is the function that people call, and :mod:`many` what it and data sets are built on.
Four folders are its steps, and each uses those before it only:

- :mod:`inputs`: what to explain (texts, images, series), as the model reads it;
- :mod:`relevance`: how the model is run, and rows of relevance by a method;
- :mod:`answers`: a whole answer, span by span and hop by hop;
- :mod:`questions`: which outputs and answers are asked about, and the example that shows them.

:mod:`parse` checks how to explain. A conversation is rendered by the tokenizer's chat template
(:mod:`messages`), and :mod:`generate` writes the answer where the model is to. :mod:`together`
takes the steps of many questions side by side. :mod:`dataset` explains thousands of rows, and
:mod:`served` what a server has answered.
"""

from captum_ssm.explanation.make.front import explain

__all__ = ["explain"]
