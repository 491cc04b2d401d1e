"""Captum's own methods as rows of an explanation, next to those of this library.

A method of gradients is given the embeddings of a text, since token ids have no gradient; one that
removes parts is given the presence of each part (:mod:`removal`), 1 or 0; one of a layer is given
the input itself. Captum's method stays as it is: a copy of it is given another ``forward_func``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from typing import Any

import torch
from captum import attr as captum_attr
from captum.attr import Attribution, FeatureAblation, NoiseTunnel, ShapleyValueSampling
from captum.attr._utils.attribution import (
    GradientAttribution,
    LayerAttribution,
    PerturbationAttribution,
)
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.capture import is_model, unwrap
from captum_ssm.capture.model import input_embeddings
from captum_ssm.explanation.make.relevance.removal import SPECIAL, Parts, Replacement, is_causal
from captum_ssm.explanation.make.relevance.rows import InputQuestions, Question, Rows
from captum_ssm.explanation.make.relevance.run import Run, are_ids
from captum_ssm.metrics.evaluation import seeded
from captum_ssm.utils.integers import as_index
from captum_ssm.utils.progress import progress
from captum_ssm.utils.watch_modules import watch_modules

# What can be asked for by name.
NAMED: dict[str, type[Attribution]] = {
    "feature-ablation": captum_attr.FeatureAblation,
    "gradient-shap": captum_attr.GradientShap,
    "input-x-gradient": captum_attr.InputXGradient,
    "integrated-gradients": captum_attr.IntegratedGradients,
    "kernel-shap": captum_attr.KernelShap,
    "occlusion": captum_attr.Occlusion,
    "saliency": captum_attr.Saliency,
    "shapley-value-sampling": captum_attr.ShapleyValueSampling,
}
# Methods with rules for modules, which products, gates and scans inside of a mixer are not.
RULES_OF_MODULES = (
    captum_attr.DeepLift,
    captum_attr.Deconvolution,
    captum_attr.GuidedBackprop,
    captum_attr.LRP,
    captum_attr.LayerDeepLift,
    captum_attr.LayerLRP,
)
# Methods that take several scores of one run; the others take one.
OF_ALL = (FeatureAblation, ShapleyValueSampling)
MISSED = 0.1  # of a score, from which on a path of so few steps is said to miss it
BATCH = 16  # inputs that the model is given at a time, of methods that let one choose
WINDOW = 3  # parts along each axis that an occlusion removes
GIVEN = ("self", "inputs", "target", "additional_forward_args", "return_convergence_delta")


class CaptumRows:
    """The rows of one of Captum's methods.

    Args:
        method (Attribution): made with the model.
        module (nn.Module): the model itself.
        options (dict): keyword arguments of the method's ``attribute``.
        tokenizer (TokenizerLike, optional): tells which token replaces a removed one.

    Raises:
        ValueError: for a method that cannot be a row, or was made with another model.
    """

    adds_up = False  # to the score above that of the baseline, if at all

    def __init__(
        self, method: Attribution, module: nn.Module, options: Mapping[str, Any], tokenizer: Any
    ) -> None:
        inner = getattr(method, "attribution_method", method)
        kinds = GradientAttribution, PerturbationAttribution, LayerAttribution
        is_known = isinstance(inner, kinds) and not isinstance(inner, RULES_OF_MODULES)
        if not is_known or isinstance(inner, captum_attr.FeaturePermutation):
            raise ValueError(
                f"{type(inner).__name__} cannot be a row of an explanation: expected a method of "
                "gradients, of perturbations or of a layer. Methods with rules for modules "
                "(DeepLift, LRP, GuidedBackprop) have none for the products and scans in a mixer."
            )
        forward = inner.forward_func
        forward = getattr(forward, "__self__", forward)
        if not is_model(forward) or unwrap(forward) is not module:
            raise ValueError(
                f"{type(inner).__name__} was made with another model or function, "
                f"{type(forward).__name__}; expected the model that is explained: "
                f"{type(inner).__name__}(model)."
            )
        self.method, self.module, self.options = method, module, dict(options)
        self.tokenizer, self.inner = tokenizer, inner
        self._takes = inspect.signature(inner.attribute).parameters
        self.forwards, self._told = 0, ""
        self._model = Run(module)

    @property
    def title(self) -> str:
        """The method's name, as Captum writes it."""
        return " ".join(self.method.get_name().split())

    @property
    def removes_parts(self) -> bool:
        """Whether it takes parts of the input away."""
        return isinstance(self.inner, PerturbationAttribution)

    @property
    def note(self) -> str:
        """What was explained, in place of what, and how many inputs the model was given."""
        cost = f"; the model was given {self.forwards} inputs" if self.forwards else ""
        names = dict.fromkeys(type(method).__name__ for method in (self.method, self.inner))
        return f"Captum's {' of '.join(names)}{self._told}{cost}"

    def rows(self, asked: Sequence[InputQuestions], what: str) -> list[Rows]:
        """Relevance ``(R, ...)`` of each input ``(1, ...)``, and the deltas ``(R,)`` if any.

        A delta is the score minus that at the baseline minus the sum of relevance.
        """
        return [self._of(example, what) for example in asked]

    def _of(self, example: InputQuestions, what: str) -> Rows:
        inputs, questions = example.inputs, example.questions
        with torch.inference_mode(False), torch.enable_grad(), seeded(0):
            inputs, self._model = inputs.clone(), example.run
            if isinstance(self.inner, LayerAttribution):
                return self._of_layer(inputs, questions, what)
            if self.removes_parts:
                return self._of_parts(inputs, questions, what), None
            return self._of_gradients(inputs, questions, what)

    def _options(self, **defaults: Any) -> dict[str, Any]:
        # The given ones, and defaults of others that the method takes.
        return {name: defaults[name] for name in defaults.keys() & self._takes} | self.options

    def _of_parts(self, inputs: Tensor, questions: Sequence[Question], what: str) -> Tensor:
        is_text, wanted = are_ids(inputs), self.options.get("baselines")
        replacement = Replacement.of(self.tokenizer, wanted if is_text else None)
        parts = Parts.of(inputs, self.module, replacement, None if is_text else wanted)
        self._told = f", which replaces parts of the input {parts.note}"
        window = [min(WINDOW, length) for length in parts.shape]
        if inputs.dim() == 3:  # the steps of each variable of a series
            window[1] = 1
        options = self._options(perturbations_per_eval=BATCH, sliding_window_shapes=tuple(window))
        groups = [questions] if isinstance(self.inner, OF_ALL) else [[q] for q in questions]
        first = min((q.position for q in questions if q.position is not None), default=None)
        is_cut = is_text and first is not None and is_causal(self._run, parts, first)
        run = partial(self._of_group, parts, options, is_cut)
        return parts.to_inputs(torch.cat([run(group) for group in progress(groups, what)]))

    def _of_group(
        self, parts: Parts, options: dict[str, Any], is_cut: bool, group: Sequence[Question]
    ) -> Tensor:
        # The rows of some questions, (R, *parts). If it is cut, tokens that no score of a causal
        # model reads are not removed, and have none.
        ends = [0 if q.position is None else q.position + 1 for q in group]
        count = max(ends) if is_cut else parts.shape[0]
        unread = parts.shape[0] - count
        presence = torch.ones(1, count, *parts.shape[1:], device=parts.inputs.device)

        def run(x: Tensor) -> Tensor:
            return self._run(parts.kept(F.pad(x, (0, unread), value=1.0) if unread else x))

        score = self._score(run, group)
        method = _with_forward(self.method, score)
        rows = method.attribute(presence, **{**options, "baselines": torch.zeros_like(presence)})
        rows = rows.detach().reshape(len(group), *presence.shape[1:]).float()
        if is_cut:
            rows = F.pad(rows, (0, unread))
            for row, end in zip(rows, ends, strict=True):
                row[end:] = 0
        return rows

    def _of_gradients(self, inputs: Tensor, questions: Sequence[Question], what: str) -> Rows:
        options = self._options(internal_batch_size=BATCH)
        is_text = are_ids(inputs)
        table = embedding_table(self.module) if is_text else None
        explained = (inputs if table is None else table(inputs)).detach().requires_grad_()
        if "baselines" in self._takes:
            baseline, name = options.get("baselines"), "zero"
            is_token = as_index(baseline) is not None or baseline in (None, *SPECIAL)
            if table is not None and is_token:
                token = Replacement.of(self.tokenizer, baseline)
                baseline = table(torch.full_like(inputs, token.token)).detach()
                name = f"the embedding of {token.name}"
            elif baseline is not None:
                name = "the given one"
            options["baselines"] = torch.zeros_like(explained) if baseline is None else baseline
            self._told = f", from the baseline {name}"
        elif is_text:
            self._told = ", at the embeddings"

        def run(x: Tensor) -> Tensor:
            if table is None:
                return self._run(x)
            outputs = []
            for part in x.split(self._model.most(len(x))):
                with _embedded(table, part):
                    outputs.append(self._run(inputs.expand(len(part), -1)))
            return torch.cat(outputs)

        relevance, deltas = self._each(run, explained, questions, what, options)
        return relevance.flatten(2).sum(2) if is_text else relevance, deltas

    def _of_layer(self, inputs: Tensor, questions: Sequence[Question], what: str) -> Rows:
        options = self._options(internal_batch_size=BATCH)
        if are_ids(inputs) and "baselines" in self._takes:
            token = Replacement.of(self.tokenizer, options.get("baselines"))
            options["baselines"] = torch.full_like(inputs, token.token)
            self._told = f", from a text of {token.name}"
        relevance, deltas = self._each(self._run, inputs, questions, what, options)
        if not are_ids(inputs) and relevance.shape[1:] == inputs.shape[1:]:
            return relevance, deltas
        if inputs.dim() != 2 or relevance.dim() < 3 or relevance.shape[1] != inputs.shape[1]:
            raise ValueError(
                f"{type(self.inner).__name__} returns relevance of shape "
                f"{tuple(relevance.shape[1:])} for an input of shape {tuple(inputs.shape[1:])}; "
                "expected a layer with one vector per token, such as the embedding."
            )
        return relevance.flatten(2).sum(2), deltas

    def _each(
        self,
        run: Callable[[Tensor], Tensor],
        inputs: Tensor,
        questions: Sequence[Question],
        what: str,
        options: dict[str, Any],
    ) -> Rows:
        # One row after the other, since the score of each has gradients of its own.
        relevance, deltas = [], []
        has_delta = bool(self.method.has_convergence_delta())
        options |= {"return_convergence_delta": True} if has_delta else {}
        for question in progress(questions, what):
            method = _with_forward(self.method, self._score(run, [question]))
            attributed = method.attribute(inputs, **options)
            row, delta = attributed if has_delta else (attributed, None)
            row = row[0] if isinstance(row, tuple) else row
            relevance.append(row.detach().float())
            if delta is not None:  # Captum's is the sum of relevance minus the score
                deltas.append(-delta.detach().float().mean())
        rows = torch.cat(relevance)
        if not deltas:
            return rows, None
        self._warn_of_deltas(rows, torch.stack(deltas))
        return rows, torch.stack(deltas)

    def _warn_of_deltas(self, rows: Tensor, deltas: Tensor) -> None:
        # A path of few steps misses the score, and then its shares are not right either.
        if "n_steps" not in self._takes:
            return
        sums = rows.flatten(1).sum(1)
        row = int((deltas.abs() / (sums + deltas).abs().clamp(min=1e-6)).argmax())
        score = float(sums[row] + deltas[row])
        if abs(float(deltas[row])) <= MISSED * abs(score):
            return
        steps = self.options.get("n_steps", 50)
        warnings.warn(
            f"{self.title} adds up to {float(sums[row]):.3g}, and the score minus that at the "
            f"baseline is {score:.3g}: with {steps} steps it does not follow its path closely "
            "enough (or the model jumps on it, as routers of experts do). Options of a method go "
            f"into a dict, methods={{'integrated-gradients': {{'n_steps': {4 * steps}}}}}.",
            UserWarning,
            stacklevel=2,
        )

    def _run(self, inputs: Tensor) -> Tensor:
        self.forwards += len(inputs)
        return self._model(inputs)

    def _score(
        self, run: Callable[[Tensor], Tensor], questions: Sequence[Question]
    ) -> Callable[[Tensor], Tensor]:
        # The scores (n, R) of n inputs, or of a method that takes one of a run (n,).
        def score(inputs: Tensor) -> Tensor:
            logits = run(inputs)
            scores = [question.score(logits) for question in questions]
            return torch.stack(scores, 1) if isinstance(self.inner, OF_ALL) else scores[0]

        return score


def _with_forward(method: Attribution, forward: Callable[..., Tensor]) -> Attribution:
    # A copy that explains another function; of a wrapper also what it wraps.
    changed = copy(method)
    changed.forward_func = forward
    if isinstance(method, NoiseTunnel):
        changed.attribution_method = _with_forward(method.attribution_method, forward)
    return changed


def embedding_table(module: nn.Module) -> nn.Module:
    """The embedding table of the tokens, or a ValueError where it is not known."""
    table = input_embeddings(module)
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    if table is None and len(tables) == 1:
        (table,) = tables
    if table is None:
        raise ValueError(
            "token ids have no gradient, and the model's embedding is not known; give the model a "
            "get_input_embeddings() that returns it, or use a method that removes tokens, such as "
            "feature-ablation."
        )
    return table


def _embedded(table: nn.Module, embeddings: Tensor) -> AbstractContextManager[None]:
    # The table returns these embeddings, whatever ids it is given.
    return watch_modules([table], after=lambda *_: embeddings)


def options_of(method: type[Attribution] | Attribution) -> list[str]:
    """The keyword arguments of a method's ``attribute`` that a row leaves to the caller."""
    inner = getattr(method, "attribution_method", None)
    names = inspect.signature(method.attribute).parameters
    chosen = [name for name, p in names.items() if p.kind is not p.VAR_KEYWORD]
    chosen = [name for name in chosen if name not in (*GIVEN, "show_progress")]
    return chosen if inner is None else [*chosen, *options_of(inner)]
