"""Calls of scans: which there are, in what forms, and whether a call is one."""

from captum_ssm.discovery.scans.calls import FunctionCall as FunctionCall
from captum_ssm.discovery.scans.calls import candidate_functions as candidate_functions
from captum_ssm.discovery.scans.calls import intercepted as intercepted
from captum_ssm.discovery.scans.calls import is_loop as is_loop
from captum_ssm.discovery.scans.calls import is_product as is_product
from captum_ssm.discovery.scans.calls import is_sum as is_sum
from captum_ssm.discovery.scans.calls import not_intercepted as not_intercepted
from captum_ssm.discovery.scans.form import Candidate, register_scan
from captum_ssm.discovery.scans.form import all_forms as all_forms
from captum_ssm.discovery.scans.form import forms_of as forms_of
from captum_ssm.discovery.scans.forms import fla as fla
from captum_ssm.discovery.scans.forms import fourier as fourier
from captum_ssm.discovery.scans.forms import linear_attention as linear_attention
from captum_ssm.discovery.scans.forms import softmax as softmax
from captum_ssm.discovery.scans.forms import ssm as ssm
from captum_ssm.discovery.scans.forms import states as states
from captum_ssm.discovery.scans.forms.loops import TokenLoop as TokenLoop
from captum_ssm.discovery.scans.forms.products import PRODUCTS as PRODUCTS
from captum_ssm.discovery.scans.forms.products import as_linear as as_linear
from captum_ssm.discovery.scans.forms.products import token_product as token_product
from captum_ssm.discovery.scans.forms.states import is_hidden as is_hidden
from captum_ssm.discovery.scans.forms.sums import TokenSum as TokenSum
from captum_ssm.discovery.scans.forms.sums import token_sum as token_sum
from captum_ssm.discovery.scans.proof import Scan as Scan
from captum_ssm.discovery.scans.proof import ScanCalls as ScanCalls
from captum_ssm.discovery.scans.proof import first_tensor as first_tensor
from captum_ssm.discovery.scans.proof import prove as prove
from captum_ssm.discovery.scans.proof import silenced as silenced
from captum_ssm.discovery.scans.reuse import KeptScans as KeptScans

__all__ = ["Candidate", "register_scan"]
