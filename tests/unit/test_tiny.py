"""The tiny model: its folder, its tokenizer, and the script that makes its weights anew."""

import multiprocessing

import pytest
import torch
from tiny_llama import examples, mean_loss, random_model, teach
from transformers import AutoTokenizer

from torchtune_grpo.models import hf_tokenizer
from torchtune_grpo.models.tiny import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    made = tmp_path_factory.mktemp("tiny") / "model"
    prepare(made)
    return str(made)


def test_tokenizer_round_trips_any_text_and_keeps_digits_apart(folder):
    tokenizer = hf_tokenizer(folder)
    for text in ("12+34=46\n</think>\n<answer>46</answer>", "Größe 漢字 \U0001f600", ""):
        ids = tokenizer.encode(text, add_bos=False, add_eos=False)
        assert tokenizer.decode(ids) == text
        assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == ids
    assert len(tokenizer.encode("1234", add_bos=False, add_eos=False)) == 4
    assert len(tokenizer.encode(" think", add_bos=False, add_eos=False)) <= 2


def inode(folder):
    prepare(folder)
    return (folder / "config.json").stat().st_ino


def test_several_processes_may_prepare_at_once(tmp_path):
    """One of them copies the folder, all find it, and what is there stays."""
    folders = [tmp_path / str(n // 2) for n in range(40)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map(inode, folders, chunksize=1)
    assert found == [*map(inode, folders)]


def test_an_empty_folder_is_filled_and_what_a_kill_has_left_goes(tmp_path):
    (tmp_path / "model").mkdir()
    prepare(tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / ".model.part")  # as if killed
    prepare(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").exists()
    assert not (tmp_path / ".model.part").exists()


@pytest.mark.slow
def test_the_weights_can_be_taught_anew(folder):
    """Thirty steps make worked answers more likely."""
    torch.manual_seed(0)
    model, by_level = random_model(folder), examples(folder)
    batch = [row[:2] for row in by_level[-1][:16]]
    before = mean_loss(model, batch).item()
    teach(model, by_level, steps=30)
    assert mean_loss(model, batch).item() < before - 2
