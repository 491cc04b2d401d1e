"""Prompt and continuation: the methods under Captum's interface for language models."""

from __future__ import annotations

import warnings
from copy import copy
from typing import Any

import torch
from captum.attr import InterpretableInput, LLMAttributionResult, LLMGradientAttribution
from torch import Tensor

from captum_ssm.attr import TokenAttribution
from captum_ssm.capture import is_model, resolve_model, unwrap
from captum_ssm.capture.check_inputs import as_ids
from captum_ssm.capture.model import extract_logits
from captum_ssm.errors import InputError
from captum_ssm.explanation.make.rows import Question, rows
from captum_ssm.explanation.make.run import Run
from captum_ssm.utils.integers import as_index
from captum_ssm.utils.vocabulary import require_known, unknown_in_prompt

ATTR_TARGETS = ("logit", "log_prob")
# Options of ``attribute`` that the continuation sets.
EXCLUDED = {
    "target": "the continuation is the target",
    "position": "each token is explained at the position that predicts it",
    "return_convergence_delta": "the result holds no delta",
    "additional_forward_args": "one text needs no mask",
}


class SSMLLMAttribution(LLMGradientAttribution):
    r"""Captum's :class:`~captum.attr.LLMGradientAttribution` for the methods of this library.

    It explains every token of a continuation by the tokens of its prompt and returns Captum's
    ``LLMAttributionResult``, whose plots and dictionaries work as they are. Prompt and
    continuation go through the model together: methods that ignore the target read all rows off
    one frozen model, the others explain a batch of (position, token) pairs. Captum's own
    gradient methods can be given too, and run as they do there.

    Args:
        attr_method (TokenAttribution): a method of this library, made with the language model.
        tokenizer (TokenizerLike): with ``encode``, ``decode`` and ``convert_ids_to_tokens``, as
            Captum asks of it.
        attr_target (str, optional): the explained score of a token: ``"logit"``, as in the
            papers, or ``"log_prob"``, as in Captum. Methods that ignore the target ignore it;
            Captum's own methods always explain the log probability. Default: ``"logit"``

    Raises:
        AssertionError: for an ``attr_method`` that is neither of this library nor supported by
            Captum (Captum's own check).
        TypeError: for a tokenizer without these functions.
        ValueError: for an unknown ``attr_target``, or a method made with a plain function in
            place of a model.

    Examples::

        >>> llm = SSMLLMAttribution(MambaLRP(model), tokenizer)
        >>> result = llm.attribute(TextTokenInput("w3 w4 w5", tokenizer), target="w6 w7")
        >>> result.token_attr.shape  # (tokens of the continuation, tokens of the prompt)
        torch.Size([2, 3])
        >>> figure, axes = result.plot_token_attr()
    """

    SUPPORTED_METHODS = (*LLMGradientAttribution.SUPPORTED_METHODS, TokenAttribution)

    def __init__(self, attr_method: Any, tokenizer: Any, attr_target: str = "logit") -> None:
        _check_attr_target(attr_target)
        needed = ("encode", "decode", "convert_ids_to_tokens")
        missing = [name for name in needed if not callable(getattr(tokenizer, name, None))]
        if missing:
            raise TypeError(
                f"tokenizer is a {type(tokenizer).__name__} without {', '.join(missing)}; expected "
                "the tokenizer of the language model, such as AutoTokenizer.from_pretrained(...)."
            )
        ours = isinstance(attr_method, TokenAttribution)
        if ours and not is_model(attr_method.forward_func):
            raise ValueError(
                f"{type(attr_method).__name__} was made with forward_func="
                f"{type(attr_method.forward_func).__name__}; generation needs the language model "
                "itself there, so that it can be asked for a continuation."
            )
        super().__init__(attr_method, tokenizer)
        self.attr_target = attr_target
        if ours:
            # Captum has put in a function that scores one token by the text before it; ours
            # explain all positions of one run.
            self.attr_method = copy(attr_method)
            self.model = unwrap(attr_method.forward_func)

    def attribute(
        self,
        inp: InterpretableInput,
        target: str | Tensor | None = None,
        gen_args: dict[str, Any] | None = None,
        *,
        internal_batch_size: int = 8,
        **kwargs: Any,
    ) -> LLMAttributionResult:
        r"""Relevance of each prompt token for each token of the continuation.

        Args:
            inp (InterpretableInput): the prompt, a :class:`~captum.attr.TextTokenInput`; its
                ``skip_tokens`` are excluded from the result.
            target (str or Tensor, optional): the continuation, as text or as token ids
                ``(T,)``; None lets the model generate it. Default: None
            gen_args (dict, optional): arguments of ``generate``, where the model generates the
                continuation. Default: None
            internal_batch_size (int, optional): how many tokens of the continuation are
                explained at a time, by methods that need gradients. Default: 8
            **kwargs: the method's own options (``aggregation``, ``start_layer``, ...).

        Returns:
            LLMAttributionResult: with ``token_attr (T, P)`` and ``seq_attr (P,)``, its sum over
            the continuation. What falls on earlier tokens of the continuation is excluded, as
            Captum does; :func:`continuation_relevance` returns it.

        Raises:
            ValueError, TypeError: as for :func:`continuation_relevance`, and for a text ``target``
                with words that the tokenizer does not know.
        """
        self._check_known(inp, target)
        if not isinstance(self.attr_method, TokenAttribution):
            return super().attribute(inp, target, gen_args, **kwargs)
        tokens = self._get_target_tokens(inp, target, gen_args=gen_args)
        prompt = self._format_model_input(inp.to_model_input())["input_ids"]
        relevance = continuation_relevance(
            self.attr_method,
            prompt,
            tokens.to(prompt.device),
            attr_target=self.attr_target,
            internal_batch_size=internal_batch_size,
            **kwargs,
        )[:, : prompt.shape[1]]
        keep = getattr(inp, "itp_mask", None)
        if keep is not None:
            relevance = relevance[:, keep[0].to(relevance.device)]
        return LLMAttributionResult(
            seq_attr=relevance.sum(0),
            token_attr=relevance,
            input_tokens=inp.values,
            output_tokens=[self.tokenizer.decode(token) for token in tokens[:, None]],
            inp=inp,
        )

    def _check_known(self, inp: InterpretableInput, target: Any) -> None:
        if isinstance(target, str):
            ids = self.tokenizer.encode(target, add_special_tokens=False)
            require_known(self.tokenizer, target, ids, "target", "a tensor gives token ids.")
        prompt = getattr(inp, "inp_tensor", None)
        warning = "" if prompt is None else unknown_in_prompt(self.tokenizer, prompt[0].tolist())
        if warning:
            warnings.warn(warning, UserWarning, stacklevel=3)


def continuation_relevance(
    method: TokenAttribution,
    prompt: Tensor,
    continuation: Tensor,
    *,
    attr_target: str = "logit",
    internal_batch_size: int = 8,
    **options: Any,
) -> Tensor:
    r"""Relevance of all earlier tokens for each token of a continuation; needs no tokenizer.

    Args:
        method (TokenAttribution): a method of this library.
        prompt (Tensor): token ids ``(1, P)`` or ``(P,)``.
        continuation (Tensor): token ids ``(T,)``.
        attr_target, internal_batch_size (optional): as for :class:`SSMLLMAttribution` and its
            ``attribute``.
        **options: the method's own.

    Returns:
        Tensor: ``(T, P + T - 1)``. Row k explains continuation token k, predicted at position
        P - 1 + k; it is zero for the tokens after that position.

    Raises:
        ValueError: for an empty prompt or continuation, ids of another shape or outside the
            vocabulary, an ``internal_batch_size`` below 1, or options that the position sets.
        TypeError: for a prompt or continuation that is no tensor of integers, or a method of
            another library.

    Examples::

        >>> rows = continuation_relevance(RawAttention(model), input_ids, torch.tensor([4, 5]))
        >>> rows.shape
        torch.Size([2, 8])
    """
    _check_attr_target(attr_target)
    for name, why in EXCLUDED.items():
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"{name} was given, but {why}; remove it.")
    if not isinstance(method, TokenAttribution):
        raise TypeError(
            f"method is a {type(method).__name__}; expected a method of captum_ssm, such as "
            "MambaLRP(model)."
        )
    for name, value in (("prompt", prompt), ("continuation", continuation)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the {name} is a {type(value).__name__}; expected a tensor of token ids, as "
                "a tokenizer's encode(..., return_tensors='pt') returns."
            )
    prompt = prompt[None] if prompt.dim() == 1 else prompt
    if prompt.dim() != 2 or len(prompt) != 1 or prompt.numel() == 0:
        raise InputError(
            f"the prompt has shape {tuple(prompt.shape)}; expected the ids of one text, "
            "(1, P) or (P,)."
        )
    if continuation.dim() != 1 or continuation.numel() == 0:
        raise InputError(
            f"the continuation has shape {tuple(continuation.shape)}; expected token ids "
            "(T,), at least one. A text may be tokenized to nothing: give the ids then."
        )
    step = as_index(internal_batch_size)
    if step is None or step < 1:
        raise ValueError(
            f"internal_batch_size is {internal_batch_size!r}; expected an integer from 1 on."
        )
    model = resolve_model(method.forward_func, method.model)
    prompt = as_ids("the prompt", prompt, model)
    continuation = as_ids("the continuation", continuation, model)
    if attr_target == "log_prob":
        method = _for_log_probabilities(method)
    ids = torch.cat([prompt, continuation[None, :-1].to(prompt)], 1)
    tokens = enumerate(continuation.tolist(), prompt.shape[1] - 1)
    questions = [Question(i, token) for i, token in tokens]
    return rows(method, Run(unwrap(model)), ids, questions, step=step, **options)[0]


def _for_log_probabilities(method: TokenAttribution) -> TokenAttribution:
    model = method.forward_func

    def log_probabilities(*args: Any, **kwargs: Any) -> Tensor:
        return extract_logits(model(*args, **kwargs)).log_softmax(-1)

    if not is_model(model) and method.model is None:
        return method
    normalized = copy(method)
    normalized.model = model if method.model is None else method.model
    normalized.forward_func = log_probabilities
    return normalized


def _check_attr_target(attr_target: str) -> None:
    if attr_target not in ATTR_TARGETS:
        raise ValueError(f"attr_target is {attr_target!r}; expected one of {ATTR_TARGETS}.")
