"""The front door: from a model and a text or an image to an explanation.

:mod:`reading` (a text as tokens) and :mod:`lens` (what each layer would answer) < :mod:`asked`
(answers and what is explained of them) < :mod:`texts` and :mod:`images` < :mod:`front`.
"""

from captum_ssm._explain.front import explain

__all__ = ["explain"]
