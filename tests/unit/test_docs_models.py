"""docs/models.md names tests that there are, and the models that are supported."""

import re
from pathlib import Path

from torchtune_grpo.models.build import SUPPORTED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/models.md").read_text()


def test_each_proof_is_a_test():
    files = ""
    for file, name in re.findall(r"`(tests/[\w/]+\.py|)::(\w+)`", PAGE):
        files = (ROOT / file).read_text() if file else files  # `::name` is of the file before
        assert f"def {name}(" in files, name


def test_the_models_are_those_that_are_supported():
    assert tuple(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) == SUPPORTED
