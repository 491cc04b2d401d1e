"""A method of one's own: it describes itself, and appears wherever methods are listed."""

import gc
import re
from contextlib import suppress
from typing import Literal

import pytest
import torch
from captum.attr import TextTokenInput
from folders import ROOT
from models import WORDS, ids, tiny

from captum_ssm import MambaRollout, SSMLLMAttribution, estimate
from captum_ssm.attr import TokenAttribution, methods
from captum_ssm.cli import main

COPYING = str(ROOT / "tutorials" / "models" / "copying-mamba")


def distance_decay():
    class DistanceDecay(TokenAttribution):
        """Relevance that falls with the distance to the query."""

        name = "distance-decay"
        summary = "the nearer a token, the more relevant"

        @classmethod
        def needs_target(cls, **options):
            return False

        def _attribute(
            self,
            arguments,
            *,
            shape: Literal["power", "step"] = "power",
            falloff: float = 0.5,
        ):
            """Relevance of each input token.

            Args:
                shape (str, optional): ``"power"`` or ``"step"``. Default: ``"power"``
                falloff (float, optional): in (0, 1). Default: 0.5
            """
            if not 0 < falloff < 1:
                raise ValueError(f"falloff is {falloff}; expected a number in (0, 1).")
            frozen = self._freeze(arguments)
            (query,) = frozen.require_query()
            query = query.argmax(1)[:, None]
            distance = query - torch.arange(frozen.shape[1])
            decay = falloff ** distance.clamp(min=0)
            if shape == "step":
                decay = (decay > 0.1).float()
            return decay * (distance >= 0)

    return DistanceDecay


@pytest.fixture
def toy():
    """The method's class in a list, which alone keeps it registered."""
    before, found = list(methods()), [distance_decay()]
    yield found
    found.clear()
    gc.collect()
    assert list(methods()) == before


def test_it_is_on_the_command_line(toy, capsys):
    given = ["explain", COPYING, "--ids", "3,4,5", "--methods", "distance-decay"]
    assert main([*given, "--shape", "step", "--falloff", "0.25"]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if line.startswith("     ")]
    assert [float(row[2]) for row in rows] == [0, 1]
    assert "not shown: '5', at which the answer is read (+1, 50% of all relevance)" in said
    assert main([*given, "--falloff", "2"]) == 1
    assert "falloff is 2.0; expected a number in (0, 1)" in capsys.readouterr().err
    assert main([*given[:-1], "latim", "--falloff", "0.5"]) == 1
    assert "--methods is latim; expected distance-decay" in capsys.readouterr().err
    with suppress(SystemExit):  # pytest.raises would keep the frames, and the class in them
        main(["explain", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--shape SHAPE For distance-decay: power or step." in said
    assert "--falloff FALLOFF For distance-decay: a number." in said


def test_it_explains_continuations(toy):
    llm = SSMLLMAttribution(toy[0](tiny()), WORDS)
    result = llm.attribute(TextTokenInput("w3 w4 w5", WORDS), target="w6 w7", falloff=0.5)
    assert result.token_attr.tolist() == [[0.25, 0.5, 1], [0.125, 0.25, 0.5]]


def test_its_cost_is_known(toy, capsys):
    tokens = ids(2, 30)
    assert estimate(toy[0](tiny()), tokens, shape="step").result_bytes == tokens.numel() * 4
    assert main(["supported", COPYING, "--length", "20"]) == 0
    said = capsys.readouterr().out.splitlines()
    lines = [line for line in said if line.startswith("  distance-decay ")]
    assert [line.split()[1:] for line in lines[:1]] == [["works"]]
    assert lines[1].endswith("iB")


def test_it_is_among_the_methods_that_tests_and_tables_run_over(toy):
    found = methods()
    assert found["distance-decay"] is toy[0]
    assert list(toy[0].options()) == ["shape", "falloff"]
    assert toy[0].options()["shape"].values == ("power", "step")
    assert "falloff (float, optional)" in toy[0].attribute.__doc__
    assert "target (int, tuple, Tensor or list" in toy[0].attribute.__doc__


def test_the_method_of_the_documentation():
    page = (ROOT / "docs" / "development" / "add_a_method.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    space = {"__name__": "add_a_method"}
    exec(compile(block, "add_a_method.md", "exec"), space)
    method, tokens = space.pop("DampedRollout")(tiny()), ids(2, 9)
    torch.testing.assert_close(
        method.attribute(tokens, damping=1.0), MambaRollout(tiny()).attribute(tokens)
    )
    assert not torch.equal(method.attribute(tokens), method.attribute(tokens, damping=0.25))
    assert methods()["damped-rollout"].options()["damping"].default == 0.5
    told = method.attribute.__doc__
    assert "damping (float, optional)" in told
    assert "target (int, tuple" in told
    with suppress(ValueError):  # pytest.raises would keep the class
        method.attribute(tokens, damping=2)
        raise AssertionError
    del method, space
    gc.collect()
    assert "damped-rollout" not in methods()
