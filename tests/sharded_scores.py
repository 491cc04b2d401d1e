"""Scores of tiny models by the harness; on two processes, run by torchrun, and on one, imported.

torchrun --nproc_per_node 2 tests/sharded_scores.py PATH
"""

import sys
from typing import Any

import torch
from captum.attr import InputXGradient, NoiseTunnel
from models import ids, randomize, tiny

from captum_ssm import MambaAttribution, MambaLRP, UnifiedImplicitAttention
from captum_ssm.metrics import (
    activation,
    bootstrap,
    cls_influence,
    delta_af,
    evaluate,
    layer_knockout,
    oversmoothing,
    perturbation,
    pruning,
    segmentation,
)
from captum_ssm.models import VisionMamba

SAMPLES = 7  # on two processes in batches of two: four samples and three


def image_scores(accelerator: Any, samples: int = SAMPLES) -> dict[str, Any]:
    torch.manual_seed(0)
    model = randomize(VisionMamba((8, 12), 4, classes=5, width=8, depth=2, state=4)).eval()
    images, masks = torch.randn(samples, 3, 8, 12), torch.randint(2, (samples, 8, 12))
    (cls,) = model.cls_tokens()

    def scores(x: torch.Tensor, masks: torch.Tensor) -> dict[str, Any]:
        with torch.no_grad():
            predicted = model(x).argmax(1)
        relevance = UnifiedImplicitAttention(model).attribute(x, predicted)
        noisy = NoiseTunnel(InputXGradient(model)).attribute(
            x.clone().requires_grad_(), target=predicted, nt_samples=2
        )
        return {
            "segmentation": segmentation(relevance, masks),
            "positive": perturbation(model, x, relevance, predicted, patch=4, removal="blur"),
            "negative": perturbation(model, x, relevance, predicted, patch=4, order="negative"),
            "smoothed": delta_af(model, x, noisy, predicted, patch=4),
            "knockout": layer_knockout(model, x, predicted),
            "alike": oversmoothing(model, x, leave_out=[cls]),
            "near": cls_influence(model, x, cls),
        }

    return evaluate(scores, images, masks, batch_size=2, accelerator=accelerator)


def text_scores(accelerator: Any) -> dict[str, Any]:
    model = tiny("mamba")
    texts = [ids(1, length)[0].tolist() for length in (5, 9, 3, 4, 8, 6, 2)]

    def scores(batch: list[list[int]]) -> dict[str, Any]:
        width = max(map(len, batch))
        x = torch.tensor([[0] * (width - len(text)) + text for text in batch])
        mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in batch])

        def last(ids: torch.Tensor) -> torch.Tensor:
            return model(ids, attention_mask=mask).logits[:, -1]

        with torch.no_grad():
            target = last(x).argmax(1)
        arguments = {"additional_forward_args": {"attention_mask": mask}}
        found = {}
        for name, method in (("lrp", MambaLRP(model)), ("attribution", MambaAttribution(model))):
            run = last, x, method.attribute(x, target, **arguments)
            found[name] = {
                "activation": activation(*run, target, removal=1, mask=mask),
                "pruning": pruning(*run, removal=1, mask=mask),
            }
        return found

    return evaluate(scores, texts, batch_size=2, accelerator=accelerator)


def all_scores(accelerator: Any) -> dict[str, Any]:
    found = {
        "images": image_scores(accelerator),
        "text": text_scores(accelerator),
        "one batch": image_scores(accelerator, samples=2),  # the second process has none
    }
    found["intervals"] = {
        "miou": found["images"]["segmentation"].miou(),
        "auac": found["text"]["lrp"]["activation"].estimate(),
        "knockout": bootstrap(found["images"]["knockout"]["layers.0.mixer"]),
    }
    return found


if __name__ == "__main__":
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    torch.save(all_scores(accelerator), f"{sys.argv[1]}-{accelerator.process_index}")
