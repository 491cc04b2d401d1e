"""Prompt and continuation: the methods under Captum's interface for language models."""

from __future__ import annotations

import warnings
from copy import copy
from typing import Any

import torch
from captum.attr import (
    Attribution,
    InterpretableInput,
    LLMAttributionResult,
    LLMGradientAttribution,
    TextTokenInput,
)
from torch import Tensor

from captum_ssm.attr import TokenAttribution
from captum_ssm.capture import is_model, unwrap
from captum_ssm.errors import brief
from captum_ssm.explanation.make.answers.continuation import Continued, check_attr_target
from captum_ssm.explanation.make.answers.trace import trace
from captum_ssm.utils.vocabulary import require_known, unknown_in_prompt


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
            papers; ``"log_prob"``, as in Captum; or ``"contrast"``, its logit minus the mean logit
            of all other tokens by their probabilities. Methods that ignore the target ignore it;
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
        check_attr_target(attr_target)
        if not isinstance(attr_method, Attribution):
            raise TypeError(
                f"attr_method is {brief(attr_method)}; expected a method made with the language "
                "model, such as MambaLRP(model)."
            )
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
        span: tuple[int, int] | None = None,
        hops: int | None = None,
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
            span, hops (optional): as for :func:`continuation_relevance`, of a method of this
                library: a row per hop in place of one per token.
            internal_batch_size (int, optional): how many tokens of the continuation are
                explained at a time, by methods that need gradients. Default: 8
            **kwargs: the method's own options (``aggregation``, ``start_layer``, ...).

        Returns:
            LLMAttributionResult: with ``token_attr (T, P)`` and ``seq_attr (P,)``, its sum over
            the continuation. What falls on earlier tokens of the continuation is excluded, as
            Captum does; :func:`continuation_relevance` returns it. With ``hops`` ``token_attr
            (K + 1, P)`` has a row per hop, and ``seq_attr`` is what all of them leave there.

        Raises:
            ValueError, TypeError: as for :func:`continuation_relevance`; for a prompt that is not
                a :class:`~captum.attr.TextTokenInput`, and for a text ``target`` with words that
                the tokenizer does not know.
        """
        if not isinstance(inp, TextTokenInput):
            raise TypeError(
                f"inp is a {type(inp).__name__}; expected a prompt in tokens, such as "
                "captum.attr.TextTokenInput(text, tokenizer)."
            )
        self._check_known(inp, target)
        if not isinstance(self.attr_method, TokenAttribution):
            if span is not None or hops is not None:
                raise TypeError(
                    f"span or hops is given, and the method is Captum's {self.attr_method}; "
                    "expected a method of captum_ssm. trace_rows takes rows of any method."
                )
            return super().attribute(inp, target, gen_args, **kwargs)
        tokens = self._tokens_of(inp, target, gen_args)
        prompt = self._format_model_input(inp.to_model_input())
        prompt = prompt if torch.is_tensor(prompt) else prompt["input_ids"]  # Captum 0.8, and later
        asked = self.attr_method, prompt, tokens.to(prompt.device)
        options = {"internal_batch_size": internal_batch_size, **kwargs}
        if span is None and hops is None:
            relevance = continuation_relevance(*asked, attr_target=self.attr_target, **options)
            total, names = relevance.sum(0), [self.tokenizer.decode(row) for row in tokens[:, None]]
        else:
            count = 0 if hops is None else hops
            traced = trace(*asked, span=span, hops=count, score=self.attr_target, **options)
            relevance, total, (first, last) = traced.relevance, traced.total, traced.span
            names = [self.tokenizer.decode(tokens[first : last + 1])]
            names += [f"hop {k}" for k in range(1, count + 1)]
        keep = getattr(inp, "itp_mask", None)
        positions = torch.arange(prompt.shape[1], device=relevance.device)
        positions = positions if keep is None else positions[keep[0].to(relevance.device)]
        result = LLMAttributionResult(
            seq_attr=total[positions],
            token_attr=relevance[:, positions],
            input_tokens=inp.values,
            output_tokens=names,
        )
        result.inp = inp  # not an argument in Captum 0.8
        return result

    def _tokens_of(self, inp: InterpretableInput, target: Any, gen_args: Any) -> Tensor:
        # Captum 0.8 adds special tokens to a text, and takes a batch of ids for one example.
        if isinstance(target, str):
            target = torch.tensor(self.tokenizer.encode(target, add_special_tokens=False))
        if torch.is_tensor(target) and gen_args is None:
            return target
        return self._get_target_tokens(inp, target, gen_args=gen_args)

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
    span: tuple[int, int] | None = None,
    hops: int | None = None,
    attr_target: str = "logit",
    internal_batch_size: int = 8,
    **options: Any,
) -> Tensor:
    r"""Relevance of all earlier tokens for each token of a continuation; needs no tokenizer.

    Args:
        method (TokenAttribution): a method of this library.
        prompt (Tensor): token ids ``(1, P)`` or ``(P,)``.
        continuation (Tensor): token ids ``(T,)``.
        span (tuple of int, optional): explain the sum of these tokens' scores in one row, the
            first and the last of them, from 0 on, negative from the end: at the cost of one row.
            None with ``hops`` is the whole continuation. Default: None
        hops (int, optional): follow what falls on tokens of the continuation back to what made the
            model write them, so many times, as :func:`trace` does. Default: None
        attr_target (str, optional): as for :class:`SSMLLMAttribution`.
        internal_batch_size (int, optional): how many tokens of the continuation are explained at a
            time, by methods that need gradients. Default: 8
        **options: the method's own.

    Returns:
        Tensor: ``(T, P + T - 1)``. Row k explains continuation token k, predicted at position
        P - 1 + k; it is zero for the tokens after that position. With ``span`` or ``hops``
        ``(K + 1, P + T - 1)``, a row per hop, where K is ``hops`` or 0.

    Raises:
        ValueError: for an empty prompt or continuation, ids of another shape or outside the
            vocabulary, an ``internal_batch_size`` below 1, a span outside the continuation, or
            options that the position sets.
        TypeError: for a prompt or continuation that is no tensor of integers, or a method of
            another library.

    Examples::

        >>> rows = captum_ssm.continuation_relevance(
        ...     RawAttention(model), input_ids, torch.tensor([4, 5])
        ... )
        >>> rows.shape
        torch.Size([2, 8])
    """
    if span is not None or hops is not None:
        traced = trace(
            method,
            prompt,
            continuation,
            span=span,
            hops=0 if hops is None else hops,
            score=attr_target,
            internal_batch_size=internal_batch_size,
            **options,
        )
        return traced.relevance
    step = internal_batch_size
    return Continued.of(method, prompt, continuation, attr_target, step, options).rows()[0]
