"""The parts of Captum this library builds on; its private helpers are imported here only."""

from captum._utils.common import _format_additional_forward_args as format_additional_forward_args
from captum._utils.common import _format_output as format_output
from captum._utils.common import _format_tensor_into_tuples as format_tensor_into_tuples
from captum._utils.common import _is_tuple as is_tuple
from captum._utils.common import _select_targets as select_targets
from captum._utils.typing import TargetType
from captum.attr._utils.attribution import Attribution
from captum.log import log_usage

__all__ = [
    "Attribution",
    "TargetType",
    "format_additional_forward_args",
    "format_output",
    "format_tensor_into_tuples",
    "is_tuple",
    "log_usage",
    "select_targets",
]
