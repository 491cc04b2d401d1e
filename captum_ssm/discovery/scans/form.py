"""Forms of scans: which arguments of a function play which role, and what it then may compute."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from captum_ssm.operators import TokenOperator


@dataclass(frozen=True, kw_only=True)
class Candidate:
    r"""What a scan function may have computed: :math:`y = g \odot (\alpha v + s \odot v)`.

    Args:
        operator (TokenOperator): :math:`\alpha`.
        values (Tensor): v, ``(B, L, D)``, with its graph.
        layouts (tuple of str): the layouts in which the function may return y: ``"BLD"``,
            ``"BDL"``, ``"BLHP"``, ``"BHLP"`` or, of one example, ``"LHP"`` (heads of P channels);
            ``"BLSHP"``, whose sum over S steps is returned as ``"BLHP"``.
        skip (Tensor, optional): s, broadcasts to ``(B, L, D)``. The function may leave it out.
            Default: None
        gates (tuple of Tensor, optional): what g may be, ``(B, L, D)`` each, with its graph; or no
            gate. Default: ()
        returned (Tensor, optional): y as it was computed, where the function returns something that
            it makes of y. Default: None
        after (Callable, optional): takes y in the layout of ``returned``, and returns what the
            function makes of it. Default: None

    Examples::

        >>> dt, v, (B, C) = torch.rand(1, 5, 4), torch.randn(1, 5, 4), torch.randn(2, 1, 5, 1, 3)
        >>> operator = DiagonalOperator(dt, dt, -torch.ones(4, 3), B, C)
        >>> Candidate(operator=operator, values=v, layouts=("BLD",)).values.shape
        torch.Size([1, 5, 4])
    """

    operator: TokenOperator
    values: Tensor
    layouts: tuple[str, ...]
    skip: Tensor | None = None
    gates: tuple[Tensor, ...] = ()
    returned: Tensor | None = None
    after: Callable[[Tensor], Tensor] | None = None


Build = Callable[..., Iterable[Candidate]]
_FORMS: dict[str, ScanForm] = {}
# How a build writes it, with and without postponed annotations.
_OPTIONAL_TENSOR = ("Tensor | None", Tensor | None)


@dataclass(frozen=True, eq=False)
class ScanForm:
    # A registered form, with the names that its roles may have. A call has to have the roles that
    # have no default, as tensors, and others are left out that are to be tensors and are not.
    build: Build
    names: Mapping[str, frozenset[str]]
    needed: tuple[str, ...]
    tensors: tuple[str, ...]
    enlarge: tuple[str, ...]

    def fits(self, parameters: Iterable[str]) -> bool:
        """Whether a function with these parameters has all the roles that are needed."""
        return not any(self.names[role].isdisjoint(parameters) for role in self.needed)

    def roles(self, parameters: Iterable[str]) -> Iterator[dict[str, str]]:
        """By role, which of the parameters of a function that fits plays it, in every way.

        A loop has the variables around it for parameters: ``x`` may be what enters its module, and
        ``u`` what it scans.
        """
        parameters = list(parameters)
        played_by = {role: [p for p in parameters if p in self.names[role]] for role in self.names}
        played = [role for role, names in played_by.items() if names]
        for names in product(*(played_by[role] for role in played)):
            yield dict(zip(played, names, strict=True))

    def arguments(
        self, roles: Mapping[str, str], call: Mapping[str, Any], returned: Tensor
    ) -> dict[str, Any] | None:
        """The arguments of a call by role; None where one that is needed is not a tensor.

        What else is no tensor, and plays a role of one, is left out: a mask that is an object, say.
        """
        by_role = {role: call[name] for role, name in roles.items()}
        for role in self.tensors:
            if not torch.is_tensor(by_role.get(role)):
                by_role.pop(role, None)
        if "returned" in self.names:
            by_role["returned"] = returned
        return by_role if all(torch.is_tensor(by_role[role]) for role in self.needed) else None


def register_scan(
    build: Build | None = None,
    *,
    names: Mapping[str, Sequence[str]] | None = None,
    enlarge: Sequence[str] = (),
) -> Any:
    """Register a form of scans: a function from the arguments of a call to what it may compute.

    A model without a registered mixer is searched for calls of Python functions whose parameters
    have the names of a form. Such a call is a scan only if an operator of the form, made from the
    arguments, returns what the function returned. So a form may yield several candidates, and a
    wrong one explains nothing.

    Args:
        build (Callable): yields :class:`~captum_ssm.discovery.scans.Candidate`. Its parameters
            are the roles; those without a default have to be there, as tensors. Arguments that
            the function does not take are not passed. A parameter ``returned`` gets what the
            function returned, to measure what no argument says. Registering a function of the
            same name again replaces it.
        names (dict, optional): for each role the names that a function's parameter may have, in
            addition to the role's own. Default: None
        enlarge (sequence of str, optional): roles, tensors, in each of which the recurrence (and
            not the skip) is linear. Where the recurrence adds so little to the result that rounding
            hides it, the function is called again with these enlarged. Default: ()

    Returns:
        The function ``build``.

    Raises:
        TypeError: for a ``build`` that cannot be called.
        ValueError: for names of a role that ``build`` does not have.

    Examples::

        >>> @register_scan(names={"x": ["values"], "decay": ["gamma"]})
        ... def running_sum(x, decay):  # h_t = decay h_(t-1) + x_t, called as f(values, gamma)
        ...     if x.dim() == 3 and decay.shape == x.shape[-1:]:
        ...         ones = torch.ones_like(x)
        ...         state = ones[..., :1, None]
        ...         yield Candidate(
        ...             operator=DiagonalOperator(
        ...                 ones, ones, decay.log()[:, None], state, state
        ...             ),
        ...             values=x,
        ...             layouts=("BLD",),
        ...         )
    """

    def register(function: Build) -> Build:
        if not callable(function):
            raise TypeError(
                f"build is a {type(function).__name__}; expected a function that takes arguments "
                "by role and yields candidates."
            )
        roles = inspect.signature(function).parameters
        unknown = [role for role in (*(names or {}), *enlarge) if role not in roles]
        if unknown:
            raise ValueError(
                f"names or enlarge hold {unknown}, but {function.__name__} has the roles "
                f"{list(roles)}; name its parameters only."
            )
        _FORMS[function.__name__] = ScanForm(
            function,
            {role: frozenset((role, *(names or {}).get(role, ()))) for role in roles},
            tuple(role for role, p in roles.items() if p.default is p.empty),
            tuple(role for role, p in roles.items() if p.annotation in _OPTIONAL_TENSOR),
            tuple(enlarge),
        )
        return function

    return register if build is None else register(build)


@lru_cache(maxsize=2)
def of_any(forms: tuple[ScanForm, ...]) -> Callable[[tuple[str, ...]], bool]:
    """A function that says whether some parameters have the roles of any form, and remembers it."""
    # Each form needs a name of these two sets, which few functions of a process have.
    first, last = (
        frozenset(name for form in forms for name in form.names[form.needed[role]])
        for role in (0, -1)
    )

    @cache
    def is_of_any(parameters: tuple[str, ...]) -> bool:
        if last.isdisjoint(parameters) or first.isdisjoint(parameters):
            return False
        return any(form.fits(parameters) for form in forms)

    return is_of_any


def names_of_module() -> frozenset[str]:
    """The names of what a loop may take from its module: all that has to be there, and a skip D.

    A scan is tried without a skip too. Of other roles, such as a bias of steps, a module may have
    made use before its loop.
    """
    roles = ((form, role) for form in _FORMS.values() for role in (*form.needed, "D"))
    return frozenset(name for form, role in roles for name in form.names.get(role, ()))


def all_forms() -> tuple[ScanForm, ...]:
    """The registered forms."""
    return tuple(_FORMS.values())


def forms_of(parameters: Sequence[str]) -> Iterator[ScanForm]:
    """The forms whose roles a function with these parameters has."""
    return (form for form in _FORMS.values() if form.fits(parameters))


def is_of_form(name: str, parameters: Iterable[str]) -> bool:
    """Whether a function with these parameters has the roles of the form of a name."""
    return _FORMS[name].fits(parameters)
