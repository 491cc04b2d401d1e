"""The pages of docs/recipes, run on small models in the form of the repositories.

``python benchmarks/repositories.py`` explains the repositories' own classes.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import repositories as small
import torch
import transformers
from folders import ROOT
from repositories import made
from torch import Tensor

PAGES = {path.name: path for path in sorted((ROOT / "docs" / "recipes").glob("*.md"))}
# Pages whose code test_language_recipes.py runs.
ELSEWHERE = {"hybrids.md", "linear_rnns.md", "mamba.md", "qwen3_next.md", "vim.md"}
INDEX = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")

# What pages import, by module.
MODULES: dict[str, dict[str, Any]] = {
    "mamba4rec": {"Mamba4Rec": lambda config, dataset: made(small.Mamba4Rec())},
    "mambavision": {"create_model": lambda name, **_: made(small.MambaVision())},
    "mmdet.apis": {"init_detector": lambda config, weights, device: made(small.Detector())},
    "mmseg.apis": {"init_model": lambda config, weights, device: made(small.EncoderDecoder())},
    "model.S_Mamba": {"Model": small.SMamba},
    "model_segmamba.segmamba": {"SegMamba": small.SegMamba},
    "models.point_mamba_scan": {"PointMambaScan": small.PointMamba},
    "nnunetv2.inference.predict_from_raw_data": {
        "nnUNetPredictor": lambda device: SimpleNamespace(
            initialize_from_trained_model_folder=lambda folder, use_folds, checkpoint_name: None,
            network=made(small.UMambaBot()),
        )
    },
    "recbole.config": {"Config": lambda model, config_file_list: None},
    "recbole.data": {
        "create_dataset": lambda config: None,
        "data_preparation": lambda config, dataset: [SimpleNamespace(dataset=None)] * 3,
    },
    "utils.config": {"cfg_from_yaml_file": lambda path: SimpleNamespace(model=None)},
    "videomamba": {"videomamba_tiny": lambda num_frames, num_classes: small.VideoMamba()},
    "vmamba": {"vmamba_tiny_s1l8": small.VSSM},
}
FORECASTS = SimpleNamespace(seq_len=96, pred_len=24)
CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "vssm1_tiny_0230s_ckpt_epoch_264.pth": lambda: {"model": made(small.VSSM()).state_dict()},
    "segmamba.pt": lambda: made(small.SegMamba()).state_dict(),
    "videomamba_t16_k400_f8_res224.pth": lambda: made(small.VideoMamba()).state_dict(),
    "Mamba4Rec.pth": lambda: {"state_dict": made(small.Mamba4Rec()).state_dict()},
    "checkpoint.pth": lambda: made(small.SMamba(FORECASTS)).state_dict(),
}
# Sizes of pages, and small ones.
SMALLER = {
    "1, 3, 224, 224": "1, 3, 32, 32",
    "1, 3, 800, 1216": "1, 3, 32, 48",
    "1, 1, 40, 224, 192": "1, 1, 6, 4, 8",
    "1, 4, 128, 128, 128": "1, 4, 4, 4, 4",
    "1, 3, 8, 224, 224": "1, 3, 2, 16, 16",
    "num_frames=8": "num_frames=2",
    "1, 2048, 3": "1, 24, 3",
    "organ = 1": "organ = int(model(volume).mean((0, 2, 3, 4)).argmax())",
    "argmax(1) == 3": "argmax(1) >= 0",
    "label = 2": "label = int(segmenter(images).sum((0, 2, 3)).argmax())",
}


class Tokenizer(SimpleNamespace):
    """Caduceus' and HyenaDNA's: a token for each base."""

    def __call__(self, text: str, return_tensors: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=torch.tensor([["ACGT".index(base) for base in text]]))


@pytest.fixture
def installed(monkeypatch, tmp_path, own_registry):
    """The repositories' modules and checkpoints, as small ones."""
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    for path, names in MODULES.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            module = ModuleType(name)
            if end == len(parts):
                vars(module).update(names)
            if end == len(parts) or name not in {p.rpartition(".")[0] for p in sys.modules}:
                monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch, "load", lambda path, **_: CHECKPOINTS[path]())

    def language(*mixers: type) -> Any:
        return staticmethod(lambda name, **_: made(small.Language(*(kind() for kind in mixers))))

    load = "from_pretrained"
    monkeypatch.setattr(
        transformers.AutoModelForMaskedLM, load, language(small.BiMamba, small.BiMamba)
    )
    monkeypatch.setattr(transformers.AutoModelForCausalLM, load, language(small.Hyena, small.Hyena))
    monkeypatch.setattr(
        transformers.AutoTokenizer, load, lambda name, **_: Tokenizer(mask_token_id=4)
    )


def code(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", PAGES[page].read_text("utf-8"), re.DOTALL))


def run(page: str) -> dict[str, Any]:
    source = code(page)
    for size, smaller in SMALLER.items():
        source = source.replace(size, smaller)
    names: dict[str, Any] = {"__name__": page}
    exec(compile(source, page, "exec"), names)
    return names


# By page, its results: the name, and the name of the input whose shape it has.
RESULTS = {
    "detector.md": {"relevance": "images", "attention": "images"},
    "genomes.md": {"relevance": "ids", "attention": "ids", "relevance_of_next": "ids"},
    "mamba4rec.md": {"relevance": "history", "by_item": "history", "why": "history"},
    "mambavision.md": {"relevance": "images", "by_patch": "images"},
    "pointmamba.md": {"relevance": "points"},
    "s_mamba.md": {"relevance": "series", "attention": "series"},
    "videomamba.md": {"relevance": "clips", "attention": "clips"},
    "vmamba.md": {"relevance": "images", "attention": "images", "read": "images"},
    "volumes.md": {"read": "volume", "relevance": "scan"},
}


def _marked(page: str) -> Any:
    # The order of points is a choice between them, as the page says.
    choice = pytest.mark.filterwarnings("ignore:.*depends on a choice between tokens")
    return pytest.param(page, marks=[choice] if page == "pointmamba.md" else [])


@pytest.mark.filterwarnings("ignore:.*depends on tokens in a way that autograd does not show")
@pytest.mark.parametrize("page", [_marked(page) for page in sorted(PAGES.keys() - ELSEWHERE)])
def test_the_code_of_a_recipe_runs(page, installed):
    names = run(page)
    for name, given in RESULTS[page].items():
        assert names[name].shape == names[given].shape, name
        assert names[name].isfinite().all(), name
        assert names[name].abs().sum() > 0, name
    CHECKS.get(page, lambda names: None)(names)


def _detected(names: dict[str, Any]) -> None:
    assert 0.05 < names["inside"] < 1
    # What the head reads of the image is what relevance is on.
    images = names["images"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(names["score"](images).sum(), images)
    assert names["relevance"][gradient == 0].abs().sum() == 0


def _recommended(names: dict[str, Any]) -> None:
    for name in ("relevance", "by_item", "why"):
        assert names[name][0, 5:].abs().sum() == 0  # padding
        assert names[name][0, :5].abs().min() > 0


def _forecast(names: dict[str, Any]) -> None:
    assert (names["by_variable"].abs() > 0).all()


def _genomes(names: dict[str, Any]) -> None:
    assert names["relevance"][0, 12:].abs().sum() > 0  # Caduceus reads what follows too
    for maps in names["maps"].values():
        assert torch.equal(maps, maps.tril())  # HyenaDNA does not


def _points(names: dict[str, Any]) -> None:
    assert names["of_groups"].shape == names["by_point"].shape == (1, 24)


def _volumes(names: dict[str, Any]) -> None:
    assert names["by_depth"].shape == (6,)
    assert names["by_sequence"].shape == (4,)


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "detector.md": _detected,
    "genomes.md": _genomes,
    "mamba4rec.md": _recommended,
    "pointmamba.md": _points,
    "s_mamba.md": _forecast,
    "volumes.md": _volumes,
}


@pytest.mark.parametrize("page", PAGES)
def test_a_recipe_has_code_a_picture_and_what_to_watch_for(page):
    text = PAGES[page].read_text(encoding="utf-8")
    assert "\n## What to watch for\n" in text
    pictures = re.findall(r"!\[([^\]]{20,})\]\((\S+)\)", text)
    assert pictures
    for _, picture in pictures:
        assert (Path("docs/recipes") / picture).as_posix().startswith("docs/recipes/../images/")
        assert (PAGES[page].parent / picture).exists(), picture
    assert f"recipes/{page}" in INDEX


def test_all_stand_ins_are_asked_for():
    pages = PAGES.keys() - ELSEWHERE
    names = {name for page in pages for name in re.findall(r"^from (\S+) import", code(page), re.M)}
    assert set(MODULES) <= names | {"utils.config"}
    read = {name for page in pages for name in re.findall(r'torch\.load\("([^"]+)"', code(page))}
    assert read == set(CHECKPOINTS)


def test_a_stand_in_of_a_segmenter_reads_its_whole_image():
    model, images = made(small.EncoderDecoder()), torch.rand(1, 3, 32, 32).requires_grad_()
    (gradient,) = torch.autograd.grad(model(images)[0, 1, 4, 4], images)
    assert isinstance(gradient, Tensor)
    assert (gradient.abs().sum(1) > 0).all()
