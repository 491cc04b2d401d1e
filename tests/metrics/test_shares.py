"""Tests of the shares of named parts."""

from __future__ import annotations

import pytest
import torch

from captum_ssm.metrics import part_shares

PARTS = {"first": range(0, 2), "second": [2, 4], "third": (3,)}


def rows() -> torch.Tensor:
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("signs", ["positive", "net", "size"])
def test_shares_are_sums_over_the_whole(signs: str) -> None:
    count = {"positive": lambda r: max(r, 0.0), "net": float, "size": abs}[signs]
    whole = sum(count(r) for r in rows().flatten().tolist())
    shares = part_shares(rows(), PARTS, signs=signs)
    assert list(shares) == list(PARTS)
    for name, part in PARTS.items():
        direct = sum(count(rows()[t, i].item()) for t in range(7) for i in part)
        assert shares[name].value == pytest.approx(direct / whole)
    # The parts are disjoint and cover the text.
    assert sum(share.value for share in shares.values()) == pytest.approx(1)


def test_the_interval_is_over_the_tokens_of_the_answer() -> None:
    alike = part_shares(rows()[:1].expand(6, 5), PARTS)["first"]
    assert alike.low == pytest.approx(alike.value) == pytest.approx(alike.high)
    # Half of the answer is from one part and half from the other.
    mixed = torch.zeros(6, 5)
    mixed[:3, 0], mixed[3:, 4] = 1.0, 1.0
    share = part_shares(mixed, PARTS)["first"]
    assert share.samples == 6
    assert share.low < 0.2 < share.value == 0.5 < 0.8 < share.high


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rows": torch.zeros(5)}, r"rows has shape \(5,\)"),
        ({"rows": torch.zeros(0, 5)}, r"rows has shape \(0, 5\)"),
        ({"signs": "absolute"}, "signs is 'absolute'"),
        ({"parts": {"a": range(3, 6)}}, r"parts\['a'\] is range\(3, 6\)"),
        ({"parts": {"a": []}}, r"parts\['a'\] is \[\]"),
        ({"parts": {"a": [1, 1]}}, "each once"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, object], message: str) -> None:
    arguments = {"rows": rows(), "parts": PARTS, **given}
    with pytest.raises(ValueError, match=message):
        part_shares(**arguments)
