"""Scans found by what they are called with, whatever module they stand in.

There is no list of functions. A Python function whose parameters are named like those of a form (x,
dt, A, B and C) is a candidate, and it is a scan only if the form's operator, made from its
arguments, returns what it returned.
"""

from captum_ssm.scans import _flash as _flash
from captum_ssm.scans import _fourier as _fourier
from captum_ssm.scans import _known as _known
from captum_ssm.scans import _linear_attention as _linear_attention
from captum_ssm.scans import _softmax as _softmax
from captum_ssm.scans import _states as _states
from captum_ssm.scans import _wkv as _wkv
from captum_ssm.scans._calls import FunctionCall as FunctionCall
from captum_ssm.scans._calls import candidate_functions as candidate_functions
from captum_ssm.scans._calls import intercepted as intercepted
from captum_ssm.scans._calls import is_product as is_product
from captum_ssm.scans._calls import not_intercepted as not_intercepted
from captum_ssm.scans._candidate import Candidate
from captum_ssm.scans._form import register_scan
from captum_ssm.scans._kept import KeptScans as KeptScans
from captum_ssm.scans._products import PRODUCTS as PRODUCTS
from captum_ssm.scans._products import as_linear as as_linear
from captum_ssm.scans._products import token_product as token_product
from captum_ssm.scans._proof import Scan as Scan
from captum_ssm.scans._proof import ScanCalls as ScanCalls
from captum_ssm.scans._proof import first_tensor as first_tensor
from captum_ssm.scans._proof import prove as prove
from captum_ssm.scans._states import is_hidden as is_hidden

__all__ = ["Candidate", "register_scan"]
