"""Served models: what a log recorded is run again through the local checkpoint, and explained.

A server's log holds a prompt, an answer and the log probability of each token, in the formats of
vLLM and of the OpenAI API. :mod:`records` reads all of them into one form, without PyTorch, after
:mod:`chunks` has joined what was streamed. :mod:`vocabulary` finds the token ids where only texts
or bytes were recorded. :mod:`rendering` makes the prompt and the answer of them that the local
model reads, :mod:`comparison` holds the model's log probabilities against the recorded ones, and
:mod:`front` does all of it for :func:`captum_ssm.replay`.
"""

from captum_ssm.explanation.make.served.front import replay, row_of

__all__ = ["replay", "row_of"]
