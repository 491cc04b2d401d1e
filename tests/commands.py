"""Commands as a user types them, and the models that they are given."""

from __future__ import annotations

from folders import ROOT

from captum_ssm.cli import main

COPYING = str(ROOT / "tutorials" / "models" / "copying-mamba")
STORIES = str(ROOT / "tutorials" / "models" / "stories-mamba")
DIGITS = str(ROOT / "tutorials" / "models" / "digits-vim")
# q w e r t y u i o p a s d f g h <SEP> q w e
READ = "16,22,4,17,19,24,20,8,14,15,0,18,3,5,6,7,26,16,22,4"


def explain(*arguments: str, model: str = COPYING) -> int:
    return main(["explain", model, *arguments])
