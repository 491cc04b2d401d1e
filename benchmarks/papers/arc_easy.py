"""Activation and pruning of ARC-Easy's questions (Ali et al., table 3; Zimerman et al., table 2).

    python benchmarks/papers/arc_easy.py --checkpoint state-spaces/mamba-1.4b-hf --limit 200

The model answers zero-shot, by the option whose text is likeliest after the question. Explained
is the right option: every token of the question by its relevance for the option's tokens, summed.
From a question of UNK the most relevant tokens come back first (activation), or the least relevant
become UNK first (pruning); the options themselves stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from explanations import chosen, of_this_library, of_token_ids
from harness import dataset, options, processes, report
from text import padded, unknown_id
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from captum_ssm import continuation_relevance
from captum_ssm.metrics import activation, bootstrap, evaluate, pruning

COLUMNS = {"activation": ("AUAC ↑", 1), "pruning": ("AU-MSE ↓", 1), "right": ("Accuracy", 100)}
SIZES = {
    "1.3B": {
        "Attribution, hidden": {"activation": 0.915, "pruning": 1.765},
        "Attribution, unified": {"activation": 0.934, "pruning": 1.588},
    },
    "2.8B": {
        "Attribution, hidden": {"activation": 0.918, "pruning": 1.239},
        "Attribution, unified": {"activation": 0.939, "pruning": 1.082},
    },
}
NOTES = (
    "Area under the probability of the right option, relative to the other options, as tokens of "
    "the question come back (AUAC), and under the mean squared change of the options' log "
    "likelihoods as they go (AU-MSE), with 95% bootstrap intervals over questions. In round "
    'brackets Zimerman et al. (2025), table 2 ("hidden" is Ali et al., 2025, table 3); neither '
    "says which prompt and which logits it took, so sizes may differ where orders should not."
)


def log_likelihoods(model: Any, prompts: Tensor, options: list[list[int]]) -> Tensor:
    """Log likelihoods ``(B, options)`` of options, lists of ids, after each prompt ``(B, P)``."""
    B, P = prompts.shape
    rows, mask = (t.to(prompts.device) for t in padded(options, 0))
    n, T = rows.shape
    ids = torch.cat([prompts[:, None].expand(-1, n, -1), rows.expand(B, -1, -1)], 2).flatten(0, 1)
    logits = model(ids[:, :-1]).logits[:, P - 1 :]
    found = logits.float().log_softmax(-1).gather(2, ids[:, P:, None])
    return (found.view(B, n, T) * mask).sum(2)


def by_this_library(method: Any, method_options: dict[str, Any]) -> Callable[..., Tensor]:
    """Relevance ``(1, P)`` of a prompt ``(1, P)`` for a continuation ``(T,)``."""

    def explain(prompt: Tensor, continuation: Tensor) -> Tensor:
        rows = continuation_relevance(method, prompt, continuation, **method_options)
        return rows[:, : prompt.shape[1]].sum(0, keepdim=True)

    return explain


def by_captum(model: Any, name: str, unknown: int) -> Callable[..., Tensor]:
    """Relevance by one of Captum's methods, of the continuation's log likelihood."""

    def explain(prompt: Tensor, continuation: Tensor) -> Tensor:
        P = prompt.shape[1]

        def likelihood(ids: Tensor) -> Tensor:
            logits = model(ids).logits[:, P - 1 : -1]
            return logits.float().log_softmax(-1).gather(2, ids[:, P:, None]).sum((1, 2))

        method = of_token_ids(likelihood, model.get_input_embeddings(), unknown)[name]
        return method(torch.cat([prompt, continuation.to(prompt)[None]], 1))[:, :P]

    return explain


def explanations(model: Any, unknown: int) -> dict[str, Callable[..., Tensor]]:
    """All methods, from a prompt and its continuation to the prompt's relevance."""
    ours = {name: by_this_library(*pair) for name, pair in of_this_library(model).items()}
    theirs = of_token_ids(model, model.get_input_embeddings(), unknown)
    return ours | {name: by_captum(model, name, unknown) for name in theirs}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--checkpoint", default="state-spaces/mamba-1.4b-hf", help="or a folder")
    parser.add_argument("--size", choices=list(SIZES), default="1.3B", help="of the paper's model")
    parser.add_argument("--data", default="allenai/ai2_arc", help="hub name, folder or file")
    parser.add_argument("--split", default="test")
    args = parser.parse_args(arguments)
    accelerator = processes(args.cpu)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint).eval().to(accelerator.device)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    unknown = unknown_id(tokenizer)
    questions = dataset(args.data, "ARC-Easy", args.split, args.limit)

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    scores = {}
    for name, method in chosen(explanations(model, unknown), args.methods).items():

        def score(batch: list[dict[str, Any]], method: Any = method) -> dict[str, Any]:
            (sample,) = batch
            prompt = torch.tensor([tokens(f"Question: {sample['question']}\nAnswer:")])
            prompt = prompt.to(accelerator.device)
            texts = [tokens(f" {text}") for text in sample["choices"]["text"]]
            right = sample["choices"]["label"].index(sample["answerKey"])
            relevance = method(prompt, torch.tensor(texts[right])).detach()

            def answer(ids: Tensor) -> Tensor:
                return log_likelihoods(model, ids, texts)

            target = torch.tensor([right], device=prompt.device)
            with torch.no_grad():
                hit = answer(prompt).argmax(1) == target
            return {
                "activation": activation(answer, prompt, relevance, target, removal=unknown),
                "pruning": pruning(answer, prompt, relevance, removal=unknown),
                "right": hit.double(),
            }

        found = evaluate(score, questions, batch_size=1, accelerator=accelerator)
        scores[name] = {
            "activation": found["activation"].estimate(),
            "pruning": found["pruning"].estimate(),
            "right": bootstrap(found["right"]),
        }
    about = {"checkpoint": args.checkpoint, "data": args.data, "questions": len(questions)}
    report(accelerator, args.output, "arc_easy", about, scores, SIZES[args.size], COLUMNS, NOTES)


if __name__ == "__main__":
    main()
