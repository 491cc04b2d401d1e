"""States over a corpus: how long they keep what is written, what fills them, and how full they are.

:mod:`half_lives` measures one input, :mod:`tally` adds up inputs without keeping them, and
:mod:`report` is the function and its result.
"""

from captum_ssm.interventions.diagnostics.report import StateReport, state_report

__all__ = ["StateReport", "state_report"]
