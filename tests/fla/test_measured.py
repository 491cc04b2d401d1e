"""Relevance through every layer adds up; what the census says of them; functions of the others."""

from __future__ import annotations

import census
import pytest
import torch
from explained import EXPLAINED, ROWS, WHOLE, build, some_fast
from fla.ops.log_linear_attn.naive import naive_log_linear_attn
from fla.ops.stickbreaking_attn.naive import naive_stickbreaking_attn
from models import ids
from proofs import assert_adds_up

from captum_ssm import MambaRollout, UnsupportedModelError, hidden_attention, supported
from captum_ssm.discovery.scans import Scan, ScanCalls, intercepted

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # fla's advice on options
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of kernels that NumPy runs
]


@pytest.mark.usefixtures("recurrences")
@pytest.mark.parametrize("name", some_fast(WHOLE))
def test_relevance_sums_to_the_logit(name):
    model, tokens = build(name), ids(2, 9)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            # RWKV-7's bonus (r_k) has the values' mean, which counts as a bias term.
            if path.endswith(("bias", "r_k")) and "dt" not in path:
                parameter.zero_()
    assert_adds_up(model, tokens)


def test_the_table_names_every_layer():
    assert census.names_in("fla").keys() == ROWS.keys()
    assert len(EXPLAINED) >= 30


@pytest.mark.usefixtures("recurrences")
def test_a_layer_with_a_branch_next_to_its_scan_is_explained_by_every_method():
    found = supported(build("RodimusAttention"), ids(1, 9), target=3)
    assert found.mixers[0].error < 1e-5
    assert set(found.methods.values()) == {None}


@pytest.mark.slow
@pytest.mark.usefixtures("recurrences")
def test_blocks_that_a_short_text_does_not_fill_are_seen_in_a_longer_one():
    name, found = "NativeSparseAttention", []
    for lengths in ((9,), (2, 9)):
        model = build(name)
        for length in lengths:
            row = MambaRollout(model).attribute(ids(1, length))
        found.append(row)
    torch.testing.assert_close(*found)


NOT_WHOLE = {
    "BitAttention": "what it does after flash_attn_func mixes channels or tokens",
    "MomAttention": "what a scan returns of several tokens lands on one",
}


@pytest.mark.usefixtures("recurrences")
@pytest.mark.parametrize("name", NOT_WHOLE)
def test_a_layer_that_is_not_explained_whole_says_why(name):
    with pytest.raises(UnsupportedModelError, match=NOT_WHOLE[name]):
        hidden_attention(build(name), ids(1, 4), formulation="unified")


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("name", ["stickbreaking", "log_linear"])
def test_functions_of_layers_that_no_cpu_runs(name, length):
    torch.manual_seed(0)
    function = {"stickbreaking": naive_stickbreaking_attn, "log_linear": naive_log_linear_attn}[
        name
    ]
    q, k, v, other = torch.randn(4, 2, length, 2, 4)
    function, extra = naive_stickbreaking_attn, {"attend_current": True}
    if name == "log_linear":
        function, levels = naive_log_linear_attn, torch.rand(2, length, 2, 8)
        extra = {"g": -torch.rand(2, length, 2), "level_scales": levels}
    found: list[Scan] = []
    calls = ScanCalls(lambda call, scan, result: found.append(scan) or result)
    with intercepted(calls, [function]), torch.no_grad():
        function(q, k, v, **extra)
    (scan,) = found
    y = function(q, k, other, **extra)
    y = y[0] if isinstance(y, tuple) else y
    assert (scan.operator.matvec(other.flatten(2)) - y.flatten(2)).abs().max() <= 2e-5
