"""What ``copy.deepcopy`` makes of a copy of a model, with which the model runs."""

import copy
from functools import partial

import torch
from torch import nn

from captum_ssm.utils.copies import copied
from captum_ssm.utils.watch_modules import watch_modules


class Chosen(nn.Module):
    """Its forward is chosen when it is made, as that of VMamba's SS2D."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.forward = partial(self.second, factor=2)

    def second(self, x, factor):
        return factor * self.linear(input=x)


def test_a_forward_that_is_chosen_runs_the_parts_of_the_copy():
    module, x, seen = Chosen(), torch.ones(1, 3), []
    with copied(module) as copies:
        found = copy.deepcopy(copies.root)
        found.linear = nn.Linear(3, 1)
        with watch_modules([found.linear], after=lambda *call: seen.append(call[2])):
            assert found(x).shape == (1, 1)
        assert copies.root(x).shape == (1, 3)
    assert [kwargs["input"] is x for kwargs in seen] == [True]


def test_a_hook_on_a_part_is_called_with_what_it_expects():
    module, x, seen = Chosen(), torch.ones(1, 3), []
    with copied(module) as copies:
        found = copy.deepcopy(copies.root)
        with watch_modules([found.linear], after=lambda *call: seen.append(len(call))):
            assert torch.equal(found(x), module(x))
    assert seen == [4]
