"""The front door: from a model and a text or an image to an explanation.

:mod:`front` parses what it is given (:mod:`parse`) into one ``TextQuestion`` (:mod:`texts`) or
``ImageQuestion`` (:mod:`images`) per example, and each answers itself. Both collect ``Questions``
(:mod:`asked`): the answers at each output, and the rows of relevance that explain them. Below are
:mod:`reading` (a text as tokens) and :mod:`lens` (what each layer would answer).
"""

from captum_ssm.explanation.make.front import explain

__all__ = ["explain"]
