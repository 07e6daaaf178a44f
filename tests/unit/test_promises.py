"""What the pages promise: a test stands beside each promise; and files are read as data."""

import os
import re
from pathlib import Path

import pytest
import torch

from torchtune_grpo.checkpoint.checkpoints import _read_state
from torchtune_grpo.models.weights import HFCheckpointer

ROOT = Path(__file__).parents[2]
PAGES = {path: (ROOT / path).read_text() for path in (
    "SECURITY.md", "docs/models.md", "docs/reward_hacking.md", "docs/rewards.md",
)}  # fmt: skip
_NAME = re.compile(r"`(tests/[\w/]+\.py|)(?:::(\w+))?`")


@pytest.mark.parametrize("page", PAGES)
def test_all_tests_that_a_page_names_are_there(page):
    files, named = "", 0
    for file, name in _NAME.findall(PAGES[page]):
        files = (ROOT / file).read_text() if file else files  # `::name` is of the file before
        assert not name or f"\ndef {name}(" in files, name
        named += bool(name)
    assert named >= 6


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/reward_hacking.md"])
def test_each_row_names_its_test(page):
    rows = re.findall(r"^\| (.*) \|$", PAGES[page], re.MULTILINE)
    assert [row for row in rows if not re.search(r"(\| Test|::\w+`)$", row)] == []


class MakesFolder:
    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_files_that_are_loaded_run_nothing(tmp_path):
    """Pickles that would call a function: of a model, and a checkpoint's state."""
    (tmp_path / "config.json").write_text("{}")
    readers = {
        "pytorch_model.bin": lambda: [*HFCheckpointer(tmp_path, tmp_path)._tensors()],
        "training_state.pt": lambda: _read_state(tmp_path / "training_state.pt"),
    }
    for name, read in readers.items():
        torch.save({"weight": MakesFolder(tmp_path / "made")}, tmp_path / name)
        with pytest.raises(Exception, match="Weights only load failed"):
            read()
        assert not (tmp_path / "made").exists()
