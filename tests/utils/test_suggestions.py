"""The closest name, or none."""

import pytest

from captum_ssm.utils.suggestions import closest, did_you_mean

KNOWN = ["attention_mask", "cross_attentions"]


@pytest.mark.parametrize(
    ("name", "cutoff", "near"),
    [
        ("atention_mask", 0.85, "attention_mask"),
        ("cross_attention", 0.6, "cross_attentions"),
        ("attn", 0.85, None),
        ("zzz", 0.6, None),
    ],
)
def test_the_closest_name(name, cutoff, near):
    assert closest(name, iter(KNOWN), cutoff) == near
    told = "" if near is None else f" Did you mean {near!r}?"
    assert did_you_mean(name, iter(KNOWN), cutoff) == told
