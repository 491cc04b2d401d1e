"""What the methods share: their construction, how they describe themselves, and their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from copy import copy
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from captum_ssm.attr.options import (
    RESULTS,
    Arguments,
    Option,
    documented,
    options_of,
    refuse_unknown,
    refuses_others,
)
from captum_ssm.attr.to_inputs import FEATURE_SHARES, of_inputs
from captum_ssm.capture import (
    FrozenModel,
    FrozenStandIns,
    Request,
    check_forward,
    check_remote,
    exact_arithmetic,
    freeze,
    is_model,
    resolve_model,
    unwrap,
    with_owner,
)
from captum_ssm.capture.finite import check_relevance
from captum_ssm.capture.span_target import SpanTarget
from captum_ssm.capture.target import balance
from captum_ssm.errors import brief
from captum_ssm.graph.in_place import seen_in_views
from captum_ssm.models.token_grid import INTERPOLATIONS
from captum_ssm.utils.allocator import workspace
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.captum_api import Attribution, TargetType, is_tuple, log_usage
from captum_ssm.utils.memory import memory_limit
from captum_ssm.utils.progress import showing
from captum_ssm.utils.quiet import quiet
from captum_ssm.utils.retry import retry_with_copies

Result = TypeVar("Result")


class ModelAttribution(Attribution):
    """An attribution that knows the model: what ``forward_func`` is, or what it runs."""

    def __init__(
        self, forward_func: Callable[..., Any], model: Any = None, *, check: bool = True
    ) -> None:
        check_forward(forward_func)
        forward_func, model = with_owner(forward_func, model)
        resolve_model(forward_func, model)
        super().__init__(forward_func)
        self.model, self.check = model, check
        self._constructed_with = forward_func

    def _known_model(self) -> Any:
        if self.model is None and not is_model(self.forward_func):
            # Captum's wrappers put a function of theirs in the place of the model that it runs.
            return self._constructed_with if is_model(self._constructed_with) else None
        return self.model


class TokenAttribution(ModelAttribution):
    r"""Base of the methods of this library: an attribution of one output to the input's tokens.

    A method is a subclass with an ``_attribute(arguments, *, its own options)``, which
    :meth:`attribute` calls. It describes itself: everything that lists methods (the command line,
    the language model wrapper, ``supported``, ``estimate``) reads the attributes below and the
    signature of ``_attribute``, and :meth:`attribute` shows its options and its docstring.

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
        TypeError: for a ``forward_func`` or ``model`` that is not a model, such as a class or a
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

    # What the method computes for :class:`Arguments` and options of its own: relevance in the shape
    # of the inputs, or what else ``return_convergence_delta`` asks for.
    _attribute: Callable[..., Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_attribute" in vars(cls) and "attribute" not in vars(cls):
            shown = documented(TokenAttribution.attribute, cls._attribute)
            cls.attribute = shown  # type: ignore[method-assign]

    @refuses_others
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
        super().__init__(forward_func, model, check=check)
        check_remote(remote, self.forward_func, self.model)
        if interpolate_mode not in (None, *INTERPOLATIONS):
            raise ValueError(
                f"interpolate_mode is {brief(interpolate_mode)}; expected one of {INTERPOLATIONS}, "
                "or None."
            )
        if feature_share not in FEATURE_SHARES:
            raise ValueError(
                f"feature_share is {brief(feature_share)}; expected one of {FEATURE_SHARES}."
            )
        self.interpolate_mode = interpolate_mode
        self.feature_share = feature_share
        self.memory_limit = memory_limit
        self.remote = remote
        self._frozen: FrozenModel | None = None

    @log_usage()
    def attribute(
        self,
        inputs: Any,
        target: TargetType = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
        return_convergence_delta: bool = False,
        return_balance: bool = False,
        show_progress: bool | None = None,
        **options: Any,
    ) -> Any:
        """Relevance of the inputs for the target, as a method's own ``_attribute`` computes it.

        The arguments are those of each method's ``attribute``.

        Raises:
            ValueError, TypeError: as for each method's ``attribute``.
        """
        self._check_options(options, return_convergence_delta)
        arguments = Arguments(
            inputs, target, additional_forward_args, position, return_convergence_delta
        )
        with showing(show_progress):
            result = computed(lambda: self._attribute(arguments, **options))
            check_relevance(result, unwrap(resolve_model(self.forward_func, self._known_model())))
            if not return_balance:
                return result
            with quiet():  # it has warned
                frozen = computed(lambda: self._freeze(arguments))
        has_several = return_convergence_delta or any(map(options.get, RESULTS))
        held = balance(frozen.require_query(), frozen.wiring)
        return (*result, held) if has_several else (result, held)

    def _check_options(self, options: Collection[str], needs_delta: bool) -> None:
        if needs_delta and not self.has_convergence_delta():
            raise ValueError(
                f"{self.get_name()} is not a decomposition of the output, so it has no convergence "
                "delta; leave return_convergence_delta at False."
            )
        refuse_unknown(f"{type(self).__name__}.attribute", options, [*self.options(), *RESULTS])

    @classmethod
    def options(cls) -> dict[str, Option]:
        """The method's own keyword arguments of ``attribute``, by name."""
        return dict(options_of(cls._attribute))

    @classmethod
    def needs_target(cls, **options: Any) -> bool:
        """Whether relevance depends on the target, given options of ``attribute``."""
        return True

    @classmethod
    def reads_whole_maps(cls, **options: Any) -> bool:
        """Whether a row depends on rows of later tokens, or of padding, given options."""
        return False

    @classmethod
    def is_additive(cls, **options: Any) -> bool:
        """Whether relevance of a weighted sum of scores is that sum of relevance, given options.

        The relevance of a :class:`~captum_ssm.attr.SpanTarget` is then the sum of its tokens' rows,
        each of them the same as of the text that ends there.
        """
        return False

    @workspace()
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

    @workspace()
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
        attributions: what the method decomposes minus their sum. Where patches are interpolated to
        pixels the sum is another than that of tokens: ask ``attribute`` there.

        Args:
            attributions (Tensor or tuple of one Tensor): of the shape of ``inputs``.
            inputs, target, additional_forward_args, position: those of ``attribute``.
            **options: those of ``attribute``.

        Raises:
            ValueError: for a method without a convergence delta.
        """
        self._check_options(options, True)
        arguments = Arguments(inputs, target, additional_forward_args, position)
        return delta(self._claimed(arguments, **options), attributions)

    def _claimed(self, arguments: Arguments) -> Tensor:
        # What attributions claim to add up to, (B,).
        return self._freeze(arguments, gradients=True).require_score()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        # Everything after the run of the model happens in this context.
        with memory_limit(self.memory_limit), exact_arithmetic():
            yield

    def _request(self, inputs: Any, additional_forward_args: Any) -> Request:
        extra = additional_forward_args
        return Request.of(self.forward_func, self._known_model(), inputs, extra, self.remote)

    def _freeze(self, arguments: Arguments, **options: Any) -> FrozenModel:
        """The model, run and frozen at a call's inputs; the options are those of ``freeze``."""
        request = self._request(arguments.inputs, arguments.additional_forward_args)
        position = arguments.position
        if position is None and isinstance(arguments.target, SpanTarget):
            position = arguments.target  # also of a run that was frozen before
        return self._run(request, position, target=arguments.target, **options)

    def _run(
        self,
        request: Request,
        position: Any = None,
        *,
        gradients: bool = False,
        substitution: FrozenStandIns | None = None,
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


def computed(run: Callable[[], Result]) -> Result:
    """What ``run()`` returns, in one workspace.

    A model that changes in place what a gradient needs is run once more, on copies.
    """
    with workspace():
        return seen_in_views(retry_with_copies)(run)


def methods() -> dict[str, type[TokenAttribution]]:
    """Every method that was defined, by its name.

    Returns:
        dict of str to type: this library's methods, and the user's own.

    Examples::

        >>> captum_ssm.attr.methods()["rollout"].__name__
        'MambaRollout'
    """
    known: dict[str, type[TokenAttribution]] = {}
    classes = TokenAttribution.__subclasses__()
    for cls in classes:
        classes.extend(cls.__subclasses__())
        if "name" in vars(cls):
            known[cls.name] = cls
    return dict(sorted(known.items()))


def delta(claimed: Tensor, attributions: Any) -> Tensor:
    """What attributions should add up to, ``(B,)``, minus what they add up to."""
    tensors = attributions if is_tuple(attributions) else (attributions,)
    total = torch.stack([tensor.flatten(1).double().sum(1) for tensor in tensors]).sum(0)
    return (claimed.detach().to(total) - total).to(claimed.dtype)
