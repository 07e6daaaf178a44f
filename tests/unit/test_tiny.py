"""The embedded default's tokenizer is also transformers', and the model is made safely."""

import multiprocessing

import pytest
import torch
from transformers import AutoTokenizer

from torchtune_grpo import tiny as _warmup
from torchtune_grpo.models import hf_model, hf_tokenizer
from torchtune_grpo.tiny import completion_log_probs, make_tiny_checkpoint, prepare, warm_up

VOCAB_SIZE = 448


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", warmup_steps=0)


def test_tokenizer_round_trips_any_text_and_keeps_digits_apart(folder):
    tokenizer = hf_tokenizer(str(folder))
    assert tokenizer.vocab_size == VOCAB_SIZE
    for text in ("12+34=46\n</think>\n<answer>46</answer>", "Größe 漢字 \U0001f600", ""):
        ids = tokenizer.encode(text, add_bos=False, add_eos=False)
        assert tokenizer.decode(ids) == text
        assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == ids
    assert len(tokenizer.encode("1234", add_bos=False, add_eos=False)) == 4
    assert len(tokenizer.encode(" think", add_bos=False, add_eos=False)) <= 2


def test_prepare_keeps_what_is_there_and_refuses_other_settings(tmp_path):
    prepare(tmp_path / "m", warmup_steps=0, seed=1)
    before = (tmp_path / "m" / "model.safetensors").stat()
    prepare(tmp_path / "m", warmup_steps=0, seed=1)
    assert (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(ValueError, match="seed"):
        prepare(tmp_path / "m", warmup_steps=0, seed=2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="thesis.tex"):
        make_tiny_checkpoint(tmp_path / "mine", warmup_steps=0)


def prepare_with_one_thread(folder):
    torch.set_num_threads(1)  # a forked process cannot use its parent's threads
    prepare(folder, warmup_steps=0)
    return (folder / "config.json").stat().st_ino


def test_several_processes_may_prepare_at_once(tmp_path):
    """One of them makes the checkpoint, and all find it."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        files = pool.map(prepare_with_one_thread, [tmp_path / "m"] * 2, chunksize=1)
    assert files[0] == files[1] == (tmp_path / "m" / "config.json").stat().st_ino


def test_the_same_seed_gives_the_same_weights(folder, tmp_path):
    again = make_tiny_checkpoint(tmp_path / "again", warmup_steps=0)
    other = make_tiny_checkpoint(tmp_path / "other", warmup_steps=0, seed=1)
    for name, depends in {"model.safetensors": True, "tokenizer.json": False}.items():
        assert (again / name).read_bytes() == (folder / name).read_bytes()
        assert ((other / name).read_bytes() != (folder / name).read_bytes()) == depends


def test_warm_up_teaches(folder, monkeypatch):
    """Thirty steps raise the likelihood of worked answers, whatever the machine's speed."""
    monkeypatch.setattr(_warmup, "NUM_PROBLEMS", 500)
    torch.manual_seed(0)
    tokenizer, model = hf_tokenizer(str(folder)), hf_model(str(folder))
    torch.nn.init.normal_(model.tok_embeddings.weight, std=0.02)
    answer = tokenizer.encode("2+3=5\n5+4=9</think>", add_bos=False, add_eos=False)
    example = [(tokenizer.encode("What is 2 + 3 + 4?", add_eos=False), answer)]
    before = completion_log_probs(model, example)[0].sum()
    warm_up(model, tokenizer, seed=0, levels=[3], steps=30)
    assert completion_log_probs(model, example)[0].sum() > before + 10
