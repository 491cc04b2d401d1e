"""What the methods share: their construction, and relevance in the shape of the input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

from torch import Tensor
from typing_extensions import Self

from captum_ssm._captum import Attribution, format_output, format_tensor_into_tuples, is_tuple
from captum_ssm._capture import is_model
from captum_ssm._frozen import (
    FrozenModel,
    check_forward,
    exact_arithmetic,
    freeze,
    resolve_model,
)
from captum_ssm._grid import INTERPOLATIONS
from captum_ssm._memory import memory_limit
from captum_ssm._remote import check_remote


class TokenAttribution(Attribution):
    """Base of the methods of this library: an attribution of one output to the input's tokens.

    Args:
        forward_func (nn.Module, nnsight model or Callable): what is explained.
        model (nn.Module or nnsight model, optional): the model that ``forward_func`` runs;
            required where ``forward_func`` is a plain callable. Default: None
        check (bool, optional): compare each frozen mixer with what the mixer really returned,
            and raise :class:`~captum_ssm.ReconstructionError` where they differ. Default: True
        interpolate_mode (str, optional): how relevance of patches is put on an image's pixels,
            ``"bilinear"``, ``"nearest"`` or ``"bicubic"``; None leaves it to the model's
            ``token_grid``, bilinear unless it says otherwise. Default: None
        memory_limit (int, optional): bytes the method may work in, beside the model and what it
            returns; picks the size of tiles. Default: None
        remote (bool or str, optional): where an nnsight model runs, as in its ``trace``: False is
            here, True the server of nnsight's configuration, a str another one's address. Maps are
            computed here in any case. Default: False

    Raises:
        TypeError: for a ``forward_func`` or ``model`` that is no model, such as a class or a
            configuration, and with ``remote`` for what has no name on a server.
        ValueError: for a plain callable without ``model``, an unknown ``interpolate_mode``, or
            ``remote`` with a method that cannot do it.

    Examples::

        >>> method = MambaRollout(lambda ids: model(ids).logits, model=model)
        >>> method.attribute(input_ids).shape
        torch.Size([1, 7])
    """

    # Whether a recording of the model's run is all that the method needs of it.
    _needs_a_recording_only = True

    def __init__(
        self,
        forward_func: Callable[..., Any],
        model: Any = None,
        *,
        check: bool = True,
        interpolate_mode: str | None = None,
        memory_limit: int | None = None,
        remote: bool | str = False,
    ) -> None:
        check_forward(forward_func)
        resolve_model(forward_func, model)
        check_remote(remote, forward_func, model)
        if remote and not self._needs_a_recording_only:
            raise ValueError(
                f"remote is {remote!r}; {self.get_name()} changes what the model does while it "
                "runs, which a server does not offer. Leave remote at False, or choose another "
                "method."
            )
        super().__init__(forward_func)
        if interpolate_mode not in (None, *INTERPOLATIONS):
            raise ValueError(
                f"interpolate_mode is {interpolate_mode!r}; accepted are {INTERPOLATIONS} and None."
            )
        self.model = model
        self.check = check
        self.interpolate_mode = interpolate_mode
        self.memory_limit = memory_limit
        self.remote = remote
        self._constructed_with = forward_func
        self._frozen: FrozenModel | None = None
        self._frozen_at: Tensor | None = None

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
        shared._frozen = self._freeze(inputs, additional_forward_args, None, query=False)
        shared._frozen_at = single_input(inputs)
        return shared

    @contextmanager
    def _computing(self) -> Iterator[None]:
        # Around everything behind the run of the model.
        with memory_limit(self.memory_limit), exact_arithmetic():
            yield

    def _model(self) -> Any:
        if self.model is None and not is_model(self.forward_func):
            # Captum's wrappers put a function of theirs in the place of the model it runs.
            return self._constructed_with if is_model(self._constructed_with) else None
        return self.model

    def _freeze(
        self,
        inputs: Any,
        additional_forward_args: Any,
        position: Any,
        *,
        target: Any = None,
        query: bool = True,
        gradients: bool = False,
        norms: bool = False,
    ) -> FrozenModel:
        if self._frozen is not None and position is not None and not gradients:
            _check_same(self._frozen_at, single_input(inputs))
            return self._frozen.at(position)
        frozen = freeze(
            self.forward_func,
            self._model(),
            single_input(inputs),
            additional_forward_args,
            position=position,
            target=target,
            query=query,
            gradients=gradients,
            norms=norms,
            check=self.check,
            remote=self.remote,
        )
        if frozen.grid is None or self.interpolate_mode is None:
            return frozen
        return replace(frozen, grid=replace(frozen.grid, mode=self.interpolate_mode))

    def compute_convergence_delta(
        self,
        attributions: Any,
        inputs: Any,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
    ) -> Tensor:
        """The explained score less the sum of attributions, ``(B,)``: what is not accounted for.

        Only for methods whose attributions claim to add up to the score
        (``has_convergence_delta()``); the arguments are those of ``attribute``, and its result.

        Raises:
            ValueError: for a method without a convergence delta.
        """
        if not self.has_convergence_delta():
            self._no_delta(True)
        frozen = self._freeze(
            inputs, additional_forward_args, position, target=target, gradients=True
        )
        assert frozen.score is not None
        total = single_input(attributions).flatten(1).sum(1)
        return frozen.score.to(total) - total

    def _no_delta(self, return_convergence_delta: bool) -> None:
        if return_convergence_delta:
            raise ValueError(
                f"{self.get_name()} is not a decomposition of the output, so it has no "
                "convergence delta; leave return_convergence_delta at False."
            )


def _check_same(frozen: Tensor | None, given: Any) -> None:
    if given is frozen:
        return
    assert frozen is not None
    alike = isinstance(given, Tensor) and given.shape == frozen.shape
    if not alike or not bool((given.to(frozen.device) == frozen).all()):
        raise ValueError(
            "inputs are not those that freeze_once was given; call freeze_once with these, or "
            "attribute of the method it was called on."
        )


def single_input(inputs: Any) -> Any:
    """The one tensor of ``inputs``, a tensor or a 1-tuple."""
    if is_tuple(inputs):
        if len(inputs) != 1:
            raise ValueError(
                f"inputs is a tuple of {len(inputs)}; accepted are one tensor and a tuple of "
                "one. What else the model takes goes into additional_forward_args."
            )
        return inputs[0]
    return inputs


def format_attributions(relevance: Tensor, frozen: FrozenModel, inputs: Any) -> Any:
    """Token relevance ``(B, L)`` in the shape of the input, zero on padding.

    Where the input has feature axes the relevance is spread evenly over them, so that summing
    them gives the token's relevance back. On an image the relevance of patches is interpolated
    (Ali et al., section 4.2); tokens that are no patch are left out.
    """
    if frozen.mask is not None:
        relevance = relevance * frozen.mask
    tensor = single_input(inputs)
    relevance = relevance.to(tensor.device)
    if tensor.dim() == 3:
        width = tensor.shape[-1]
        relevance = (relevance / width)[..., None].expand(-1, -1, width).contiguous()
    elif tensor.dim() == 4:
        if frozen.grid is None:
            raise ValueError(
                f"inputs has shape {tuple(tensor.shape)}: which token is which patch is not known "
                "of this model; give it a method token_grid(height, width) that returns a "
                "captum_ssm.models.TokenGrid."
            )
        _, colours, height, width = tensor.shape
        pixels = frozen.grid.pixels(relevance, (height, width))
        relevance = (pixels / colours)[:, None].expand(-1, colours, -1, -1).contiguous()
    return format_output(is_tuple(inputs), format_tensor_into_tuples(relevance.detach()))
