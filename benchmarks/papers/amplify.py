"""AMPLIFY: few-shot prompts with the words an explanation picks (Krishna et al., 2023).

    python benchmarks/papers/amplify.py --data snarks.json \\
        --checkpoint state-spaces/mamba-1.4b-hf --proxy state-spaces/mamba-790m-hf

As Zimerman et al. (2025, table 5) use it. A small proxy answers the questions of a validation
split by the likeliest option, and those that it gets wrong with the most confidence (by the
likeliest wrong option's probability less the right one's, the misclassification confidence score)
become the shots. An explanation of the right answer, on the proxy, picks the words of each shot
that speak for it most, and its rationale names them: "The key words: ... are important clues to
predict ... as the correct answer." The large model reads the shots, writes a rationale for the
question and answers by the likeliest option. For comparison, the same shots without rationales,
and no shots.

--data is a task of BIG-Bench Hard as published (snarks.json, formal_fallacies.json: a list
"examples" of "input" and "target"), or a data set of questions with choices (tau/commonsense_qa).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from arc_easy import by_captum, by_this_library, log_likelihoods
from explanations import chosen, of_this_library, of_token_ids
from harness import dataset, options, processes, report
from text import unknown_id
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from captum_ssm.metrics import bootstrap, evaluate

COLUMNS = {"accuracy": ("Accuracy, %", 100)}
VANILLA = "Vanilla"
SHOTS_ALONE = "Shots without rationales"
# Zimerman et al., table 5: the answering model's size and the task.
TABLE = {
    "1.3B": {
        "snarks": (44.54, 53.11, 56.15),
        "commonsense_qa": (52.15, 53.55, 54.72),
        "formal_fallacies": (40.13, 44.28, 45.22),
    },
    "2.8B": {
        "snarks": (48.75, 58.10, 60.02),
        "commonsense_qa": (53.11, 56.10, 56.08),
        "formal_fallacies": (44.67, 47.80, 47.86),
    },
}
NOTES = (
    "Share of right answers, with 95% bootstrap intervals over questions; in round brackets "
    "Zimerman et al. (2025), table 5. Their prompts and number of shots are not published."
)
OPTION = re.compile(r"^\s*(?:\(([A-Z])\)|- (.+?)\s*$)", re.MULTILINE)
Explain = Callable[[Tensor, Tensor], Tensor]
"""A prompt's ids ``(1, P)`` and an answer's ``(T,)`` to the prompt's relevance ``(1, P)``."""


@dataclass(frozen=True)
class Question:
    """A question, the answers there are, and the number of the right one."""

    text: str
    options: tuple[str, ...]
    right: int


def questions(data: Any) -> list[Question]:
    """The questions of BIG-Bench Hard (input, target), or of a set with choices."""
    found = []
    for example in data:
        if "choices" in example:
            labels = [f"({label})" for label in example["choices"]["label"]]
            lines = zip(labels, example["choices"]["text"], strict=True)
            text = "\n".join([example["question"], *(f"{a} {b}" for a, b in lines)])
            right = f"({example['answerKey']})"
        else:
            text, right = example["input"], example["target"]
            matches = OPTION.findall(text.rpartition("Options:")[2])
            labels = [f"({letter})" if letter else line for letter, line in matches]
        if right not in labels:
            raise SystemExit(f"the answer {right!r} is none of the options {labels} of: {text}")
        found.append(Question(text, tuple(labels), labels.index(right)))
    return found


def load(name: str, limit: int | None) -> list[Question]:
    """A task's questions in a fixed random order."""
    path = Path(name)
    if path.suffix == ".json" and "examples" in (content := json.loads(path.read_text())):
        order = torch.randperm(
            len(content["examples"]), generator=torch.Generator().manual_seed(0)
        ).tolist()
        return questions([content["examples"][k] for k in order[:limit]])
    return questions(dataset(name, None, "validation", limit, seed=0))


class Answerer:
    """A language model that answers by the likeliest option after a prompt."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    def ids(self, text: str) -> list[int]:
        """The text's token ids, nothing added."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def prompt(self, text: str) -> Tensor:
        """The ids of a text as a batch of one, ``(1, P)``."""
        return torch.tensor([self.ids(text)], device=self.model.device)

    def probabilities(self, prompt: str, question: Question) -> Tensor:
        """The probability of each option after the prompt, ``(options,)``; they add up to one."""
        with torch.no_grad():
            found = log_likelihoods(
                self.model, self.prompt(prompt), [self.ids(f" {o}") for o in question.options]
            )
        return found[0].softmax(0).cpu()

    def line(self, prompt: str, most: int) -> str:
        """How the model continues the prompt, up to the end of the line."""
        ids = self.prompt(prompt)
        with torch.no_grad():
            found = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=most,
                do_sample=False,
                pad_token_id=unknown_id(self.tokenizer),
            )
        return self.tokenizer.decode(found[0, ids.shape[1] :]).split("\n")[0].strip()


def asked(question: Question) -> str:
    """The question as every prompt has it."""
    return f"Question: {question.text}\n"


def confidence(probabilities: Tensor, right: int) -> float:
    """The misclassification confidence score: positive where the answer is wrong."""
    wrong = probabilities.clone()
    wrong[right] = -torch.inf
    return float(wrong.max() - probabilities[right])


def shots(proxy: Answerer, questions: Sequence[Question], count: int) -> list[Question]:
    """The questions that the proxy gets wrong with the most confidence, most confident first."""
    scored = [confidence(proxy.probabilities(asked(q) + "Answer:", q), q.right) for q in questions]
    order = sorted(range(len(questions)), key=lambda k: -scored[k])
    return [questions[k] for k in order[:count]]


def key_words(proxy: Answerer, explain: Explain, question: Question, count: int) -> list[str]:
    """The question's words with the most relevance for its right answer, in the text's order.

    A word has the relevance of its tokens, added up; each is named once.
    """
    text = asked(question) + "Answer:"
    encoded = proxy.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    answer = torch.tensor(proxy.ids(f" {question.options[question.right]}"))
    relevance = explain(proxy.prompt(text), answer)[0].detach().cpu()
    begin = text.index(question.text)
    total: dict[str, float] = {}
    for match in re.finditer(r"\w[\w'-]*", question.text):
        start, stop = begin + match.start(), begin + match.end()
        inside = [k for k, (a, b) in enumerate(encoded.offset_mapping) if a < stop and b > start]
        total[match.group()] = total.get(match.group(), 0.0) + float(relevance[inside].sum())
    best = sorted(total, key=lambda word: -total[word])[:count]
    return [word for word in total if word in best]


def rationale(words: Sequence[str], answer: str) -> str:
    """Krishna et al.'s template, their section 3."""
    listed = ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1]
    return f"The key words: {listed} are important clues to predict {answer} as the correct answer."


def few_shot(examples: Sequence[tuple[Question, str | None]]) -> str:
    """Solved questions, each with its rationale unless that is None."""
    parts = []
    for question, reason in examples:
        middle = "" if reason is None else f"Rationale: {reason}\n"
        parts.append(f"{asked(question)}{middle}Answer: {question.options[question.right]}\n\n")
    return "".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--data", required=True, help="a task's .json, or a data set")
    parser.add_argument("--checkpoint", default="state-spaces/mamba-1.4b-hf", help="answers")
    parser.add_argument("--proxy", default="state-spaces/mamba-790m-hf", help="is explained")
    parser.add_argument("--shots", type=int, default=4)
    parser.add_argument("--words", type=int, default=5, help="in a rationale (k)")
    parser.add_argument("--validation", type=float, default=0.2, help="share that shots are from")
    parser.add_argument("--task", choices=list(TABLE["1.3B"]), default="snarks", help="the paper's")
    parser.add_argument("--size", choices=list(TABLE), default="1.3B", help="of the paper's model")
    args = parser.parse_args(arguments)
    accelerator = processes(args.cpu)

    def answerer(name: str) -> Answerer:
        model = AutoModelForCausalLM.from_pretrained(name).eval().to(accelerator.device)
        return Answerer(model, AutoTokenizer.from_pretrained(name))

    large, proxy = answerer(args.checkpoint), answerer(args.proxy)
    unknown = unknown_id(proxy.tokenizer)
    explanations = {
        name: by_this_library(*pair) for name, pair in of_this_library(proxy.model).items()
    }
    theirs = of_token_ids(proxy.model, proxy.model.get_input_embeddings(), unknown)
    explanations |= {name: by_captum(proxy.model, name, unknown) for name in theirs}
    found = load(args.data, args.limit)
    split = max(1, int(args.validation * len(found)))
    examples, held_out = shots(proxy, found[:split], args.shots), found[split:]
    if not held_out:
        raise SystemExit(f"--data {args.data}: {len(found)} questions leave none to answer.")
    prompts = {VANILLA: ("", False), SHOTS_ALONE: (few_shot([(q, None) for q in examples]), False)}
    for name, explain in chosen(explanations, args.methods).items():
        reasons = [
            rationale(key_words(proxy, explain, q, args.words), q.options[q.right])
            for q in examples
        ]
        prompts[name] = few_shot(list(zip(examples, reasons, strict=True))), True
    scores = {}
    for name, (before, reasoned) in prompts.items():

        def score(batch: list[Question], before: str = before, reasoned: bool = reasoned) -> Tensor:
            (question,) = batch
            prompt = before + asked(question)
            if reasoned:
                prompt += "Rationale:"
                prompt += f" {large.line(prompt, most=60)}\n"
            best = int(large.probabilities(prompt + "Answer:", question).argmax())
            return torch.tensor([float(best == question.right)])

        scores[name] = {"accuracy": bootstrap(evaluate(score, held_out, batch_size=1,
                                                       accelerator=accelerator))}  # fmt: skip
    about = {
        "checkpoint": args.checkpoint,
        "proxy": args.proxy,
        "data": args.data,
        "questions": len(held_out),
        "shots": len(examples),
        "words": args.words,
    }
    named = (VANILLA, "Attribution, hidden", "Attribution, unified")
    values = TABLE[args.size][args.task]
    paper = {name: {"accuracy": v} for name, v in zip(named, values, strict=True)}
    written = {name: prompt for name, (prompt, _) in prompts.items()}
    report(accelerator, args.output, "amplify", about, scores, paper, COLUMNS, NOTES, written)


if __name__ == "__main__":
    main()
