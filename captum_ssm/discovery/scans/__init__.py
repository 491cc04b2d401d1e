"""How an unknown module becomes a frozen mixer, from the calls of scans inside of it.

*The idea.* Nothing is known of a module but that it runs. While it runs, each call that may be a
scan is looked at: the library makes an operator of the call's arguments and computes the result
again. If both agree, the call is a scan, whatever its name is and whoever wrote it. A guess costs
time and cannot lie. Around its scans a mixer treats each token by itself, which is why the rest can
be measured with a few gradients. The finished mixer is compared with the module's output, too.

::

    a run of the model                        mixers/discovery: which modules hold scans
      |  a call f(u, delta, A, B, C)          _calls: intercepted where f is defined
      v
    form -> candidates: operator, values,     _known, _flash, ...: what f may compute
      |     skip, gates, layouts              of arguments with such names
      v
    proof: operator(values) == result?        _proof: no -> the next candidate, then impulses
      |  yes
      v
    Scan: operator, values, gate              taken: noted, cut off, or exchanged
      |
      v
    module run again, its scans cut off       mixers/_cut: each result becomes a leaf
      |  projection, directions,              mixers/measured: steps that each read what
      |  convolution, skips, branches         tokens and channels go where off gradients
      v
    FrozenMixer, compared with the module

*The terms.* A **role** is what an argument is to a scan (x, dt, A, B, C; q, k, v), whatever the
function calls it. A **form** is a function of roles that yields **candidates**: operators that a
call may have computed. A call with a proven candidate is a **scan**. Where no form fits but
queries, keys and values are there, the maps are measured with **impulses**, one per token. A
**cut** run replaces what scans and convolutions returned by leaves of the graph. A **direction** is
the part of a scan that runs over the module's tokens in one order.

*What is looked at*: Python functions whose parameters have the names of a form, PyTorch's softmax
attention, convolutions by Fourier transforms, products of tokens with a matrix (``softmax(q k)
v``), loops over tokens whose results are gathered, and associative scans.

*The order of the files.* ``_form`` says what a form and a candidate are, and registers them.
``_arguments`` and ``_heads`` are for those who write forms; ``_known``, ``_linear_attention``,
``_softmax``, ``_flash`` and ``_fourier`` are the forms. ``_products``, ``_loops`` and ``_states``
make calls of what is no function. ``_calls`` intercepts, ``_proof`` decides, with ``_impulses`` and
``_packed`` (several sequences in one row). ``_kept`` reuses what a slow scan returned.

A form of your own takes ten lines: ``docs/development/add_a_scan_form.md``.
"""

from captum_ssm.discovery.scans.calls import FunctionCall as FunctionCall
from captum_ssm.discovery.scans.calls import candidate_functions as candidate_functions
from captum_ssm.discovery.scans.calls import intercepted as intercepted
from captum_ssm.discovery.scans.calls import is_product as is_product
from captum_ssm.discovery.scans.calls import not_intercepted as not_intercepted
from captum_ssm.discovery.scans.form import Candidate, register_scan
from captum_ssm.discovery.scans.forms import fla as fla
from captum_ssm.discovery.scans.forms import fourier as fourier
from captum_ssm.discovery.scans.forms import linear_attention as linear_attention
from captum_ssm.discovery.scans.forms import softmax as softmax
from captum_ssm.discovery.scans.forms import ssm as ssm
from captum_ssm.discovery.scans.forms import states as states
from captum_ssm.discovery.scans.forms.products import PRODUCTS as PRODUCTS
from captum_ssm.discovery.scans.forms.products import as_linear as as_linear
from captum_ssm.discovery.scans.forms.products import token_product as token_product
from captum_ssm.discovery.scans.forms.states import is_hidden as is_hidden
from captum_ssm.discovery.scans.proof import Scan as Scan
from captum_ssm.discovery.scans.proof import ScanCalls as ScanCalls
from captum_ssm.discovery.scans.proof import first_tensor as first_tensor
from captum_ssm.discovery.scans.proof import prove as prove
from captum_ssm.discovery.scans.proof import silenced as silenced
from captum_ssm.discovery.scans.reuse import KeptScans as KeptScans

__all__ = ["Candidate", "register_scan"]
