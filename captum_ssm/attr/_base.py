"""What the methods share: their construction, how they describe themselves, and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from captum_ssm._captum import Attribution, is_tuple
from captum_ssm._capture import (
    FrozenModel,
    Request,
    Substitution,
    check_forward,
    check_remote,
    exact_arithmetic,
    freeze,
    is_model,
    resolve_model,
    unwrap,
)
from captum_ssm._capture.finite import check_relevance
from captum_ssm._grid import INTERPOLATIONS
from captum_ssm._memory import memory_limit
from captum_ssm._workspace import workspace
from captum_ssm.attr._inputs import FEATURE_SHARES, of_inputs
from captum_ssm.attr._options import Option, described, no_delta, options_of


class TokenAttribution(Attribution):
    r"""Base of the methods of this library: an attribution of one output to the input's tokens.

    A method is a subclass with an ``attribute`` of its own. It describes itself: everything that
    lists methods (the command line, the language model wrapper, ``supported``, ``estimate``)
    reads the attributes below and the signature of ``attribute``.

    Args:
        forward_func (nn.Module, nnsight model or Callable): what is explained.
        model (nn.Module or nnsight model, optional): the model that ``forward_func`` runs;
            required where ``forward_func`` is a plain callable. Default: None
        check (bool, optional): compare each frozen mixer with what the mixer really returned,
            and raise :class:`~captum_ssm.ReconstructionError` where they differ. Default: True
        interpolate_mode (str, optional): how relevance of patches is put on an image's pixels,
            ``"bilinear"``, ``"nearest"`` or ``"bicubic"``; None leaves it to the model's
            ``token_grid``, bilinear unless it says otherwise. Where a model has none, relevance is
            carried to the pixels by the measured transport, or with a mode interpolated from the
            measured grid. Default: None
        feature_share (str, optional): how a token's relevance is shared among its features, such
            as the variables of a series or an image's colors. ``"linear"``: by the size of what
            each adds, with the sign of the token's relevance: of a series, where the method takes
            gradients of a score, :math:`|(\partial s / \partial x_e)\, x_e|`; else, to the model's
            tokens, :math:`\|(\partial h / \partial x_e)\, x_e\|`. ``"even"``: in equal parts, as it
            always is over the axes of an embedding. A method whose relevance is per feature
            (MambaLRP) does not use it. Default: ``"linear"``
        memory_limit (int, optional): bytes the method may work in, in addition to the model and
            the result; picks the size of tiles. Default: None
        remote (bool or str, optional): where an nnsight model runs, as in its ``trace``: False is
            here, True the server of nnsight's configuration, a str another one's address. Of a run
            there only single layers are known: what goes through layers, or explains a score, is
            refused. Experimental: no public server has run it yet. Default: False

    Attributes:
        name (str): on the command line and in tables.
        summary (str): what it computes, in a few words.
        cost (str): of what follows the run of the model, in the number of tokens, with the
            default options: ``"linear"`` or ``"quadratic"``.

    Raises:
        TypeError: for a ``forward_func`` or ``model`` that is no model, such as a class or a
            configuration, and with ``remote`` for what has no name on a server.
        ValueError: for a plain callable without ``model``, an unknown ``interpolate_mode`` or
            ``feature_share``.

    Examples::

        >>> method = MambaRollout(lambda ids: model(ids).logits, model=model)
        >>> method.attribute(input_ids).shape
        torch.Size([1, 7])
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    cost: ClassVar[str] = "linear"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "attribute" in vars(cls):
            cls.attribute = described(vars(cls)["attribute"])

    def __init__(
        self,
        forward_func: Callable[..., Any],
        model: Any = None,
        *,
        check: bool = True,
        interpolate_mode: str | None = None,
        feature_share: str = "linear",
        memory_limit: int | None = None,
        remote: bool | str = False,
    ) -> None:
        check_forward(forward_func)
        resolve_model(forward_func, model)
        check_remote(remote, forward_func, model)
        super().__init__(forward_func)
        if interpolate_mode not in (None, *INTERPOLATIONS):
            raise ValueError(
                f"interpolate_mode is {interpolate_mode!r}; expected one of {INTERPOLATIONS}, or "
                "None."
            )
        if feature_share not in FEATURE_SHARES:
            raise ValueError(
                f"feature_share is {feature_share!r}; expected one of {FEATURE_SHARES}."
            )
        self.model = model
        self.check = check
        self.interpolate_mode = interpolate_mode
        self.feature_share = feature_share
        self.memory_limit = memory_limit
        self.remote = remote
        self._constructed_with = forward_func
        self._frozen: FrozenModel | None = None

    @classmethod
    def options(cls) -> dict[str, Option]:
        """The method's own keyword arguments of ``attribute``, by name."""
        return dict(options_of(cls.attribute))

    @classmethod
    def needs_target(cls, **options: Any) -> bool:
        """Whether relevance depends on the target, given options of ``attribute``."""
        return True

    @classmethod
    def reads_whole_maps(cls, **options: Any) -> bool:
        """Whether a row depends on the rows of later tokens, given options of ``attribute``."""
        return False

    def freeze_once(self, inputs: Any, additional_forward_args: Any = None) -> Self:
        """A copy that has run the model once, at ``inputs``, and reads every row off that run.

        Its ``attribute`` has to be called with the same inputs and arguments, and with a
        ``position``. Calls that take gradients run the model all the same.

        Args:
            inputs (Tensor or tuple of one Tensor): as for ``attribute``.
            additional_forward_args (Any, optional): as for ``attribute``. Default: None

        Raises:
            ValueError, TypeError: as for ``attribute``.

        Examples::

            >>> frozen = RawAttention(model).freeze_once(input_ids)
            >>> rows = [frozen.attribute(input_ids, position=i) for i in (3, 6)]
        """
        shared = copy(self)
        shared._frozen = self._run(self._request(inputs, additional_forward_args), query=False)
        return shared

    def compute_convergence_delta(
        self,
        attributions: Any,
        inputs: Any,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
        **options: Any,
    ) -> Tensor:
        """What attributions that claim to add up leave out, ``(B,)``.

        The same number as that of ``attribute(..., return_convergence_delta=True)``, for any
        attributions: what the method decomposes less their sum. Not where patches are interpolated
        to pixels, whose sum is another than that of tokens: there ask ``attribute``.

        Args:
            attributions (Tensor or tuple of one Tensor): of the shape of ``inputs``.
            inputs, target, additional_forward_args, position: those of ``attribute``.
            **options: those of ``attribute``.

        Raises:
            ValueError: for a method without a convergence delta.
        """
        if not self.has_convergence_delta():
            raise no_delta(self.get_name())
        request = self._request(inputs, additional_forward_args)
        return delta(self._claimed(request, target, position, **options), attributions)

    def _claimed(self, request: Request, target: Any, position: Any) -> Tensor:
        # What attributions claim to add up to, (B,).
        return self._run(request, position, target=target, gradients=True).require_score()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        # Around everything after the run of the model.
        with workspace(), memory_limit(self.memory_limit), exact_arithmetic():
            yield

    def _known_model(self) -> Any:
        if self.model is None and not is_model(self.forward_func):
            # Captum's wrappers put a function of theirs in the place of the model it runs.
            return self._constructed_with if is_model(self._constructed_with) else None
        return self.model

    def _request(self, inputs: Any, additional_forward_args: Any) -> Request:
        extra = additional_forward_args
        return Request.of(self.forward_func, self._known_model(), inputs, extra, self.remote)

    def _check_relevance(self, relevance: Any) -> None:
        check_relevance(relevance, unwrap(resolve_model(self.forward_func, self._known_model())))

    def _run(
        self,
        request: Request,
        position: Any = None,
        *,
        gradients: bool = False,
        substitution: Substitution | None = None,
        **options: Any,
    ) -> FrozenModel:
        # The options are those of freeze.
        before = None if gradients or substitution is not None else self._frozen
        if before is not None and (position is not None or before.query is not None):
            if not request.same_as(before.request):
                raise ValueError(
                    "inputs or additional_forward_args are not those that freeze_once was given; "
                    "call freeze_once with these, or attribute of the method it was called on."
                )
            return before if position is None else before.at(position)
        frozen = freeze(
            request,
            position=position,
            gradients=gradients,
            substitution=substitution,
            check=self.check,
            **options,
        )
        mode = self.interpolate_mode
        return frozen if mode is None or substitution is not None else frozen.from_patches(mode)

    def _formatted(self, relevance: list[Tensor], frozen: FrozenModel) -> Any:
        return of_inputs(relevance, frozen, self.feature_share, self.interpolate_mode)


def methods() -> dict[str, type[TokenAttribution]]:
    """Every method that was defined, by its name.

    Returns:
        dict of str to type: this library's methods, and the user's own.

    Examples::

        >>> captum_ssm.attr.methods()["rollout"].__name__
        'MambaRollout'
    """
    found: dict[str, type[TokenAttribution]] = {}
    classes = TokenAttribution.__subclasses__()
    for cls in classes:
        classes.extend(cls.__subclasses__())
        if "name" in vars(cls):
            found[cls.name] = cls
    return dict(sorted(found.items()))


def delta(claimed: Tensor, attributions: Any) -> Tensor:
    """What attributions should add up to, ``(B,)``, less what they do."""
    given = attributions if is_tuple(attributions) else (attributions,)
    total = torch.stack([one.flatten(1).double().sum(1) for one in given]).sum(0)
    return (claimed.detach().to(total) - total).to(claimed.dtype)
