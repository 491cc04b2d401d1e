"""What a model writes after a text: its own ``generate``, or the likeliest token one by one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture.model import parameter_names
from captum_ssm.errors import InputError, brief
from captum_ssm.explanation.make.inputs.media import refusals_explained
from captum_ssm.explanation.make.inputs.reading import read_ids
from captum_ssm.explanation.make.questions.texts import TextQuestion
from captum_ssm.explanation.make.relevance.run import Run
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.integers import count_of
from captum_ssm.utils.random_state import random_state_kept
from captum_ssm.utils.suggestions import did_you_mean

# The text is given by ``explain``, and one answer to it is explained.
OURS = ("input_ids", "inputs", "inputs_embeds", "attention_mask")


@dataclass(frozen=True)
class Generation:
    """How an answer is written: as ``explain`` takes it, checked.

    Args:
        length (int, optional): the most tokens that are written; None for what the model's
            ``generate`` does by itself. Default: None
        options (dict, optional): of ``generate``. Default: ``{}``
    """

    length: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def written(self, question: Any) -> TextQuestion:
        """The question with what the model writes as its target.

        The model's settings and the random state are left as they were.

        Raises:
            TypeError: for a question that is not about the next token of a text.
            ValueError: for options that ``generate`` does not have, and where it writes nothing.
        """
        if not isinstance(question, TextQuestion):
            raise TypeError(
                "max_new_tokens is given, and the model does not write texts: expected a language "
                "model and a text. Leave max_new_tokens and generation out."
            )
        model: nn.Module = question.setup.model
        device = next(model.parameters()).device
        ids = torch.tensor([question.prompt.ids], device=device)
        media, tokenizer = question.prompt.media, question.setup.tokenizer
        told = refusals_explained(model, media, ids)
        with torch.no_grad(), random_state_kept(), _settings_kept(model), told:
            if callable(getattr(model, "generate", None)):
                whole = self._generated(model, ids, {} if media is None else media.on(ids))
            else:
                whole = self._likeliest(question.task.run_on(question.prompt), ids, tokenizer)
        P = ids.shape[1]
        if whole.shape[-1] <= P or not torch.equal(whole[:P], ids[0]):
            raise InputError(
                f"{type(model).__name__}.generate returns {whole.shape[-1]} tokens for a text of "
                f"{P} tokens; expected the text, and at least one token after it. Write the answer "
                "first, and pass its ids: target=ids."
            )
        answer = read_ids(tokenizer, whole[P:].tolist(), "the answer")
        return replace(question, target=answer)

    def _generated(self, model: nn.Module, ids: Tensor, media: Mapping[str, Any]) -> Tensor:
        names = inspect.signature(model.generate).parameters  # type: ignore[arg-type]
        known, takes_any = {*names}, any(p.kind is p.VAR_KEYWORD for p in names.values())
        defaults: dict[str, Any] = {}
        if "generation_config" in names:  # as in transformers, which takes any name and checks it
            known |= _generation_options() | {*parameter_names(model)}
            takes_any = False
            defaults = {"attention_mask": torch.ones_like(ids)}
            if "generation_config" not in self.options:
                defaults |= {"do_sample": False, "num_beams": 1}
        _require_known(self.options, known, takes_any)
        if self.length is not None and "max_length" in names and "max_new_tokens" not in names:
            defaults["max_length"] = ids.shape[1] + self.length  # as in mamba_ssm
        elif self.length is not None:
            defaults["max_new_tokens"] = self.length
        options = {**defaults, **media, **self.options}
        returned: Any = model.generate(ids, **options)  # type: ignore[operator]
        sequences = returned if torch.is_tensor(returned) else returned.sequences
        return sequences.reshape(-1, sequences.shape[-1])[0].to(ids.device)

    def _likeliest(self, run: Run, ids: Tensor, tokenizer: Any) -> Tensor:
        _require_known(self.options, {"eos_token_id"}, False)
        if self.length is None:
            raise InputError(
                f"generation is given without max_new_tokens, and {type(run.module).__name__} has "
                "no generate that knows where to end; expected max_new_tokens."
            )
        ends = self.options.get("eos_token_id", getattr(tokenizer, "eos_token_id", None))
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        for _ in range(self.length):
            logits = run(ids)
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
            if int(ids[0, -1]) in ends:
                break
        return ids[0]


def parse_generation(
    max_new_tokens: Any, generation: Any, target: Any, position: Any
) -> Generation | None:
    """How answers are written; None where they are given, or the next token is explained.

    Raises:
        ValueError, TypeError: for a length or options of a wrong type, and together with what
            they cannot go with.
    """
    if max_new_tokens is None and generation is None:
        return None
    if generation is not None and not isinstance(generation, Mapping):
        raise TypeError(
            f"generation is {brief(generation)}; expected a dict of the options of the model's "
            "generate, such as {'do_sample': True, 'temperature': 0.7}."
        )
    options = dict(generation or {})
    if max_new_tokens is not None and "max_new_tokens" in options:
        raise InputError("max_new_tokens is given twice, also in generation; give it once.")
    asked = options.pop("max_new_tokens", max_new_tokens)
    length = None if asked is None else count_of("max_new_tokens", asked, 1)
    count = options.get("num_return_sequences", 1)
    if count != 1:
        raise InputError(
            f"generation has num_return_sequences={count}; expected one answer per text. Call "
            "explain once for each, with another seed."
        )
    if target is not None:
        raise InputError(
            f"target is {brief(target)}, so there is nothing to write; give either target, or "
            "max_new_tokens (and generation)."
        )
    if position is not None and position != "all":
        raise InputError(
            f"position is {brief(position)}, which explains tokens of the text; with "
            "max_new_tokens, the answer is explained: leave one of them out, or use position='all' "
            "for both."
        )
    return Generation(length, options)


def _generation_options() -> set[str]:
    from transformers import GenerationConfig

    return {name for name in GenerationConfig().to_dict() if not name.startswith("_")}


def _require_known(options: Mapping[str, Any], known: set[str], takes_any: bool) -> None:
    for name in options:
        if name in OURS:
            raise InputError(
                f"generation holds {name!r}, which explain gives to generate itself; leave it out."
            )
        if name in known or takes_any:
            continue
        raise InputError(
            f"generation holds {name!r}, which the model's generate does not know."
            f"{did_you_mean(name, known)} Expected its options, such as do_sample, temperature or "
            "eos_token_id."
        )


@contextmanager
def _settings_kept(model: nn.Module) -> Iterator[None]:
    # Caches and settings that generate keeps on the model or changes in its configurations.
    owners = [model, *(getattr(model, name, None) for name in ("config", "generation_config"))]
    settings = [(owner, dict(vars(owner))) for owner in owners if hasattr(owner, "__dict__")]
    try:
        yield
    finally:
        for owner, before in settings:
            for name in vars(owner).keys() - before.keys():
                del vars(owner)[name]
            vars(owner).update(before)
