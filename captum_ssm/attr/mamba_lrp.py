"""MambaLRP: layer-wise relevance propagation through frozen mixers (Jafari et al., 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm._captum import TargetType, format_output, is_tuple, log_usage
from captum_ssm._capture import capture, is_norm, unwrap
from captum_ssm._devices import weights_loaded
from captum_ssm._frozen import (
    call_forward,
    check_finite,
    check_inputs,
    check_reconstruction,
    extra_arguments,
    padding_mask,
    read_score,
    resolve_model,
    token_shape,
)
from captum_ssm._memory import limited_graph, memory_limit
from captum_ssm.attr._base import TokenAttribution, single_input
from captum_ssm.attr._norms import FrozenNorm, first_input
from captum_ssm.attr._relevance import relevance_at
from captum_ssm.mixers import FrozenMixer, MixerCall, find_adapter
from captum_ssm.mixers._base import activation_factor


class MambaLRP(TokenAttribution):
    r"""Gradient times input through a network whose data-dependent parts are frozen.

    Relevance propagation that conserves the explained score (Jafari, Montavon, Müller & Eberle,
    `MambaLRP <https://arxiv.org/abs/2406.07592>`_). The model runs once, and on the way back

    - a recurrence's coefficients (:math:`\Delta, A, B, C`; decays, keys and queries), attention
      probabilities and routers' weights are constants, as is everything that comes out of a
      sigmoid, a softmax or an exponential;
    - an activation is its argument times a constant, :math:`\mathrm{SiLU}(x) = \sigma(x)\,x`;
    - a product of two tensors, such as a SiLU gate and its signal, gives half of its relevance to
      each;
    - a norm's denominator is a constant, and any other denominator.

    What is left is linear in the embeddings, so that :math:`R_j = \sum_e x_{je}\,\partial s /
    \partial x_{je}` adds up to the score s less what the biases contribute, through MLPs, experts,
    gates and soft caps alike. Mixers and norms are replaced by frozen forms that return the same
    values, which is checked; the other rules are attached to the nodes of the autograd graph,
    whichever module they come from, and change no value. A function without a rule (a fused
    kernel with a backward pass of its own) keeps its plain gradient; the convergence delta says
    what that costs. Autograd keeps no argument of :func:`torch.tanh`: where its result is rounded
    to ±1 (\|x\| > 9 in float32, 3.5 in bfloat16), relevance is too large by about \|x\| over that
    limit. :class:`torch.nn.Tanh` is exact.

    Args:
        forward_func (nn.Module, nnsight model or Callable): what is explained.
        model (nn.Module or nnsight model, optional): the model ``forward_func`` runs; required
            where it is a plain callable. Default: None
        check (bool, optional): see :class:`~captum_ssm.ReconstructionError`. Default: True
        memory_limit (int, optional): bytes that the graph of the run may keep, beside the model;
            a run that needs more raises :class:`~captum_ssm.MemoryLimitError`. Default: None
        interpolate_mode (optional): not used; an image's pixels have relevance of their own.
        remote (bool, optional): must be False: the run is changed, not only recorded.

    Examples::

        >>> relevance, delta = MambaLRP(model).attribute(
        ...     input_ids, target=token, return_convergence_delta=True
        ... )
    """

    _needs_a_recording_only = False

    def get_name(self) -> str:
        """The method's name."""
        return "MambaLRP"

    def has_convergence_delta(self) -> bool:
        """True: relevance claims to add up to the score."""
        return True

    @log_usage()
    def attribute(
        self,
        inputs: Any,
        target: TargetType = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
        return_convergence_delta: bool = False,
    ) -> Any:
        r"""Relevance of each input token for the target.

        Args:
            inputs (Tensor or tuple of one Tensor): token ids ``(B, L)``, embeddings
                ``(B, L, E)`` or images ``(B, C, H, W)``.
            target (int, tuple, Tensor or list, optional): as for
                :class:`~captum_ssm.MambaAttribution`. Default: None
            additional_forward_args (Any, optional): further arguments of ``forward_func``, as
                in Captum; a dict is passed by keyword. Default: None
            position (int or Tensor, optional): the token whose output is explained, an int or
                ``(B,)``; None for the one the model reads its output from. Default: None
            return_convergence_delta (bool, optional): also return the score less the sum of
                relevance, ``(B,)``: what the biases contribute, and what parts of the model
                that could not be frozen fail to conserve. Default: False

        Returns:
            Tensor or tuple: relevance of the shape of ``inputs``, zero on padding; a token's
            is spread evenly over its embedding, a pixel's over its colours. With
            ``return_convergence_delta`` a pair of it and the delta.

        Raises:
            ValueError: for inputs, a target or a position that are not accepted, an unsupported
                model, or a mixer whose frozen operator does not reproduce its output.
            TypeError: for inputs of a wrong type or dtype.
        """
        tensor = single_input(inputs)
        model = resolve_model(self.forward_func, self._model())
        tensor = check_inputs(tensor, model)
        extra = extra_arguments(self.forward_func, tensor, additional_forward_args)
        leaves: list[Tensor] = []
        rebuilt: list[tuple[MixerCall, Tensor]] = []
        if tensor.is_floating_point():
            with torch.inference_mode(False):
                tensor = tensor.detach().clone().requires_grad_(True)
            leaves.append(tensor)

        def run() -> Any:
            return call_forward(self.forward_func, tensor, extra)

        with memory_limit(self.memory_limit), limited_graph(unwrap(model), self.get_name()):
            captured = capture(
                run,
                model,
                gradients=True,
                also=_is_frozen_by_lrp,
                substitute=lambda call: _substitute(
                    call, tensor, leaves, rebuilt if self.check else None
                ),
            )
        shape = token_shape(captured.calls, tensor)
        mask = padding_mask(captured, *shape)
        check_finite(captured.calls)
        for call, output in rebuilt:
            check_reconstruction(call.path, call, output, mask)
        _, score = read_score(captured, target, position, mask, shape)
        if not leaves:
            raise ValueError(
                "the model embeds its ids by something other than a torch.nn.Embedding, so the "
                "start of the propagation is not known; explain the embeddings instead."
            )
        relevance = relevance_at(leaves[0], score).to(tensor.device)
        features = 1 if relevance.dim() == 4 else -1
        width = relevance.shape[features]
        relevance = relevance.sum(features)
        if mask is not None and relevance.dim() == 2:
            relevance = relevance * mask.to(relevance.device)
        delta = score.detach().to(relevance) - relevance.flatten(1).sum(1)
        if tensor.is_floating_point():
            relevance = (relevance / width).unsqueeze(features).expand_as(tensor).contiguous()
        result = format_output(is_tuple(inputs), (relevance,))
        return (result, delta) if return_convergence_delta else result


def frozen_output(mixer: FrozenMixer) -> Tensor:
    """A mixer's output, ``(B, L, E)``, differentiable in its inputs by the rules above.

    Args:
        mixer (FrozenMixer): read from a call whose tensors are alive in a graph.
    """
    return mixer.detach_coefficients().output(_halves)


def _halves(a: Tensor, b: Tensor) -> Tensor:
    # The product, with half of its relevance to each factor.
    return 0.5 * (a * b.detach() + a.detach() * b)


def _is_frozen_by_lrp(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or is_norm(module) or _is_activation(module)


def _is_activation(module: nn.Module) -> bool:
    # Those of torch are single nodes of the graph, with a rule of their own; that of tanh does
    # not know the argument where tanh saturates.
    return isinstance(module, nn.Tanh) or type(module).__module__ == "transformers.activations"


def _substitute(
    call: MixerCall,
    inputs: Tensor,
    leaves: list[Tensor],
    rebuilt: list[tuple[MixerCall, Tensor]] | None,
) -> Any:
    if isinstance(call.module, nn.Embedding):
        # The table that is asked for the ids themselves; another may embed positions.
        given = next(a for a in (*call.args, *call.kwargs.values()) if torch.is_tensor(a))
        if leaves or not torch.equal(given.to(inputs.device), inputs):
            return call.result
        leaves.append(call.result.detach().clone().requires_grad_(True))
        return leaves[0]
    frozen: Tensor | None
    adapter = find_adapter(call.module)
    if adapter is not None:
        check_finite([call])
        with weights_loaded(call.module):
            mixer = adapter(call)
        if rebuilt is not None:
            with torch.no_grad():
                rebuilt.append((call, mixer.output()))
        frozen = frozen_output(mixer)
    elif is_norm(call.module):
        norm = FrozenNorm.of(call)
        frozen = None if norm is None else norm(first_input(call))
    else:
        frozen = _activation(call)
    if frozen is None:
        return call.result
    # The model goes on with the very values it computed.
    value = call.output
    frozen = frozen.to(value.dtype)
    frozen = frozen + (value - frozen).detach()
    if isinstance(call.result, (tuple, list)):
        return type(call.result)([frozen, *call.result[1:]])
    return frozen


def _activation(call: MixerCall) -> Tensor | None:
    x = first_input(call).to(call.output.dtype)

    def function(x: Tensor) -> Tensor:
        return type(call.module).forward(call.module, x)

    with torch.no_grad():
        if float(function(x.new_zeros(1))) != 0:
            return None  # a gate
        factor = activation_factor(function, x)
    return x * factor
