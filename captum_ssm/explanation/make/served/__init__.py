"""Served models: what a log recorded is run again through the local checkpoint, and explained.

A server's log holds a prompt, an answer and the log probability of each token, in the formats of
vLLM and of the OpenAI API. :mod:`log` finds the records in a file, and :mod:`records` reads all of
them into one form, after :mod:`chunks` has joined what was streamed and :mod:`evaluations` has
taken apart the logs of Inspect and lm-eval.
:mod:`vocabulary` finds the token ids where only texts or bytes were recorded. :mod:`rendering`
makes the prompt and the answer of them that the local model reads. The run that is explained is
also the one whose log probabilities are held against the recorded ones
(:mod:`captum_ssm.explanation.make.recorded`). :mod:`front` does all of it for
:func:`captum_ssm.replay`, and :class:`captum_ssm.ServedLog` for data sets.
"""

from captum_ssm.explanation.make.served.front import replay

__all__ = ["replay"]
