"""The logs in this folder, as Inspect and lm-evaluation-harness write them of packaged models.

Needs an environment with both, and without a network (inspect_ai 0.3.285 and lm_eval 0.4.13 made
the files that are here):

    HF_HUB_OFFLINE=1 python tests/logs/make_logs.py
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODELS = HERE.parents[1] / "captum_ssm" / "examples" / "data"
CHATS = (
    ("Anna has a red ball. Tom has a blue kite. What color is Tom's kite?", "blue"),
    ("Mia has a pink hat. Ben has a green car. What color is Mia's hat?", "pink"),
)
CHOICES = (
    ("The bird near the dogs", ["sings.", "bark.", "sing."], 0),
    ("Anna has a red ball. Tom has a blue kite. Anna's ball is ", ["red.", "blue."], 0),
)
WRITTEN = (("Anna has a red ball. Tom has a blue kite. Anna's ball is", "red"),)
CHOICE_TASK = {
    "task": "stories_choices",
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{gold}}",
    "metric_list": [{"metric": "acc"}],
}
WRITTEN_TASK = {
    "task": "stories_written",
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{gold}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 4, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


def inspect_logs() -> None:
    """Two conversations, in Inspect's own format and in JSON, and a grader of another model."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import (
        ChatMessageSystem,
        ChatMessageUser,
        GenerateConfig,
        ModelOutput,
        ModelUsage,
        get_model,
    )
    from inspect_ai.scorer import model_graded_qa
    from inspect_ai.solver import generate

    samples = [
        Sample(
            input=[
                ChatMessageSystem(content="Answer with one word."),
                ChatMessageUser(content=question),
            ],
            target=answer,
            id=f"chat {k}",
        )
        for k, (question, answer) in enumerate(CHATS)
    ]
    config = GenerateConfig(max_tokens=4, logprobs=True, top_logprobs=1, temperature=0.01)
    says = ModelOutput.from_content("mockllm/model", "GRADE: C")
    says.usage = ModelUsage()  # which would be counted by a tokenizer from the network
    for kind in ("eval", "json"):
        model = get_model("hf/local", model_path="chat-mamba", device="cpu", memoize=False)
        grader = get_model("mockllm/model", custom_outputs=lambda *given: says, memoize=False)
        task = Task(samples, solver=generate(), scorer=model_graded_qa(model=grader), name="chats")
        with tempfile.TemporaryDirectory() as folder:
            eval(
                task, model, log_dir=folder, log_format=kind, display="none", **config.model_dump()
            )
            (path,) = Path(folder).glob(f"*.{kind}")
            (HERE / f"inspect.{kind}").write_bytes(path.read_bytes())


def lm_eval_logs() -> None:
    """Choices with the log probability of each, and answers that the model wrote."""
    import lm_eval
    from lm_eval.loggers import EvaluationTracker

    docs: dict[str, list[dict[str, Any]]] = {
        "choices": [dict(text=t, choices=c, gold=g) for t, c, g in CHOICES],
        "written": [dict(text=t, gold=g) for t, g in WRITTEN],
    }
    for name, task in (("choices", CHOICE_TASK), ("written", WRITTEN_TASK)):
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder, "docs.jsonl")
            data.write_text("\n".join(map(json.dumps, docs[name])))
            local = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
            results = lm_eval.simple_evaluate(
                model="hf",
                model_args={"pretrained": "stories-mamba", "device": "cpu"},
                tasks=[{**task, **local, "test_split": "test"}],
                log_samples=True,
                bootstrap_iters=0,
            )
            assert results is not None
            tracker = EvaluationTracker(output_path=folder)
            samples = results.pop("samples")
            tracker.save_results_aggregated(results=results, samples=samples)
            tracker.save_results_samples(task_name=task["task"], samples=samples[task["task"]])
            (path,) = Path(folder).rglob("samples_*.jsonl")
            (HERE / f"samples_stories_{name}.jsonl").write_bytes(path.read_bytes())


def copied(name: str) -> None:
    """Copy a packaged model to the current folder, with a last token, which lm-eval wants."""
    shutil.copytree(MODELS / name, name)
    path = Path(name, "tokenizer_config.json")
    held = json.loads(path.read_text())
    path.write_text(json.dumps({"eos_token": held["unk_token"]} | held))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the logs tell where the models lay
        for name in ("chat-mamba", "stories-mamba"):
            copied(name)
        inspect_logs()
        lm_eval_logs()
