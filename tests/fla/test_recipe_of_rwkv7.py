"""The page of RWKV-7 in docs/recipes, on fla's own class at a small size."""

import re
import sys
from pathlib import Path

import fla.models
import pytest
import transformers
from layers import RWKV7
from models import VOCABULARY, randomize, word_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "linear_rnns.md"
WORDS = ["The", "the", "keys", "key", "to", "cabinet", "cabinets", "are", "is", "tall"]


@pytest.mark.filterwarnings("ignore")
def test_the_code_of_the_page_explains_rwkv7(naive, monkeypatch):
    settings = RWKV7 | {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
    config = fla.models.RWKV7Config(**settings, fuse_norm=False, fuse_cross_entropy=False)
    model = randomize(fla.models.RWKV7ForCausalLM(config)).eval()
    words = WORDS + [f"w{k}" for k in range(VOCABULARY - len(WORDS))]
    tokenizer = word_tokenizer({word: k for k, word in enumerate(words)})
    load = "from_pretrained"
    monkeypatch.setattr(transformers.AutoModelForCausalLM, load, lambda name, **_: model)
    monkeypatch.setattr(transformers.AutoTokenizer, load, lambda name, **_: tokenizer)
    text = PAGE.read_text(encoding="utf-8")
    (section,) = re.findall(r"^## RWKV-7\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    before = "from captum_ssm import explain, supported\n"
    before += "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
    names = {"texts": ["The keys to the cabinet"]}
    exec(before + code, names)
    assert sys.modules["fla"] is names["fla"]
    kinds = {mixer.kind for mixer in names["report"].mixers}
    assert kinds == {"RWKV7Attention"}
    assert max(mixer.error for mixer in names["report"].mixers) < 1e-4
    relevance = names["of_rwkv"].relevance(against=" is")
    assert abs(relevance[:5]).min() > 0
