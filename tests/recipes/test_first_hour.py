"""A new user's mistakes end in one line that says what to do, before a weight is read."""

import re

import pytest
from omegaconf import OmegaConf
from runs import NO_EVALUATION, RECIPE, run, run_tiny, tiny_overrides, tune

from torchtune_grpo.config.command_line import load_config

CONFIG = "llama3_2_1B_lora_grpo"
SHORT = ["num_steps=1", *NO_EVALUATION]
# test_messages.py and tests/unit/test_config.py have the others.
MISTAKES = {
    "output_dir=/dev/null/x": "output_dir=/dev/null/x: cannot be written to",
    "tokenizer.path=/no/such": "tokenizer.path=/no/such: no such file; `tune download",
    "checkpointer.adapter_checkpoint=a.safetensors": r"checkpointer\.adapter_.*: is not read",
    # GSM8K's rows as they are: the gold is a worked answer.
    "eval_dataset._component_=torchtune_grpo.data.RLDataset eval_dataset.prompt_column=question": (
        r"eval_dataset: 12 of 12 rows .* are left out: the reward 'correctness' can score no "
        r"answer: answer='0 \+ 2 = .*torchtune_grpo\.data\.gsm8k_dataset"
    ),
}


def check(*arguments, cwd, **settings):
    """Run ``torchtune-grpo config``."""
    return run("-m", "torchtune_grpo", "config", CONFIG, *arguments, cwd=cwd, **settings)


def keys_in(text: str) -> list[str]:
    return sorted(re.findall(r"^Error: ([\w.\[\]]+)[=:]", text, re.M))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_line(tmp_path, mistake):
    """The checkpoint is garbage, so that loading it would fail differently."""
    overrides = tiny_overrides(CONFIG, tmp_path)
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"garbage")
    overrides += mistake.split()
    done = tune("run", RECIPE, "--config", CONFIG, *overrides, cwd=tmp_path, check=False)
    assert done.code == 1
    (line,) = [line for line in done.err.splitlines() if line.startswith("Error")]
    assert done.err.endswith(f"{line}\n") and "Traceback (most" not in done.err
    assert re.match(f"Error: {MISTAKES[mistake]}", line), line
    assert len((done.out + done.err).splitlines()) <= 5


def test_all_mistakes_are_reported_at_once_by_the_run_and_by_the_check(tmp_path):
    """Keys are checked before any file is looked for, then files and components."""
    overrides = tiny_overrides(CONFIG, tmp_path)
    wrong = ["grpo_sample=4", "temperature=0", "model.lora_rnk=4", "optimizer.lr=fast"]
    wrong += ["tokenizer=no.such", "loss.kl_coeff=-1"]
    keys = ["grpo_sample", "loss.kl_coeff", "model.lora_rnk", "optimizer.lr", "temperature"]
    keys += ["tokenizer._component_"]
    ran = tune("run", RECIPE, "--config", CONFIG, *overrides, *wrong, cwd=tmp_path, check=False)
    checked = check(*overrides, *wrong, "~checkpointer.checkpoint_dir", cwd=tmp_path, check=False)
    assert keys_in(ran.err) == keys == keys_in(checked.err)
    (tmp_path / "llama" / "model.safetensors").unlink()
    done = check(*overrides, "rewards.0.name=''", cwd=tmp_path, check=False)
    assert keys_in(done.err) == ["checkpointer", "rewards[0].name"]
    for each in (ran, checked, done):
        assert each.code == 1 and not each.out and "Traceback" not in each.err
    assert not (tmp_path / "out").exists()


def test_a_config_without_mistakes_is_reported_as_such(tmp_path):
    overrides = tiny_overrides(CONFIG, tmp_path)
    done = check(*overrides, "device=cuda", cwd=tmp_path)
    assert done.out.startswith("Note: device=cuda: torch")
    assert done.out.splitlines()[-1] == f"{CONFIG}: no mistake found."
    folder = tmp_path / "run"  # a run's folder is a config, too
    folder.mkdir()
    OmegaConf.save(load_config(CONFIG, overrides), folder / "torchtune_config.yaml")
    done = run("-m", "torchtune_grpo", "config", "run", cwd=tmp_path)
    assert done.out.splitlines()[-1] == "run: no mistake found."


def test_data_are_looked_at_before_the_model_is_there(tmp_path):
    """So is what the logger imports; a prompt's length in tokens is for the real tokenizer."""
    node = "_component_: torchtune_grpo.data.RLDataset, source: rows.jsonl, max_prompt_tokens: 2"
    data = [f"dataset={{{node}}}", "eval_dataset=null", "model_dir=none"]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "7 plus 2?", "answer": "9"}\n' * 9)
    command = ["-m", "torchtune_grpo", "config", "smollm2_135M_grpo", *data, "batch_size=1"]
    note = "Note: prepare: the model is fetched when a run starts, and not checked yet.\n"
    done = run(*command, cwd=tmp_path)
    assert done.out == f"{note}smollm2_135M_grpo: no mistake found.\n"
    wrong = ["dataset.columns={gold: answer}", "metric_logger=torchtune.training.metric_logging."]
    wrong[-1] += "CometLogger"
    done = run(*command, *wrong, cwd=tmp_path, check=False)
    told, needs = done.err.splitlines()[-2:]
    assert told.endswith("CometLogger: needs comet_ml; pip install comet_ml.")
    assert needs.startswith("Error: The reward 'correctness' needs the column 'answer', but data")


@pytest.mark.slow
def test_a_traceback_goes_to_a_file_or_on_request_to_the_terminal(tmp_path):
    """An error that is not about the user's keys always shows it on the terminal."""
    (tmp_path / "my_parts.py").write_text(
        "import os, torch\n"
        "class Late(torch.optim.SGD):\n"
        "    def zero_grad(self, **given):\n"
        "        raise KeyError('my bug')\n"
        "def wrong(prompts, completions, **columns):\n"
        "    return [1.0]\n"
        "def blocked(prompts, completions, **columns):\n"
        "    os.makedirs('full/error.txt')\n"
        "    return [1.0]\n"
    )
    reward = ["rewards.0=my_parts.wrong", *SHORT]
    done = run_tiny(CONFIG, tmp_path, *reward, check=False)
    file = tmp_path / "out" / "error.txt"
    assert done.err.endswith(
        "Error: The reward 'correctness' returned 1 values for 8 completions; return a list with "
        "one number or None per completion.\n"
    )
    assert f"Traceback: {file}" in done.err and "ContractError" in file.read_text()
    done = run_tiny(CONFIG, tmp_path, *reward, check=False, TORCHTUNE_GRPO_TRACEBACK="1")
    assert "Traceback (most recent call last)" in done.err
    done = run_tiny(CONFIG, tmp_path, "optimizer=my_parts.Late", *SHORT, check=False)
    assert "in zero_grad\n    raise KeyError('my bug')" in done.err
    assert done.err.endswith("Error: KeyError: 'my bug'\n")
    # As on a full disk: a folder is in the file's place.
    full = ["rewards.0=my_parts.blocked", "output_dir=full", *SHORT]
    done = run_tiny(CONFIG, tmp_path, *full, check=False)
    assert done.code == 1 and done.err.splitlines()[-1].startswith("Error: The reward 'correctn")


FULL = """
import torch
from torchtune_grpo.loss import GRPOLoss

class Full(GRPOLoss):
    def __call__(self, **tensors):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""


def test_a_full_device_is_an_error_that_names_the_keys_to_lower(tmp_path):
    (tmp_path / "full.py").write_text(FULL)
    done = run_tiny(CONFIG, tmp_path, *SHORT, "loss._component_=full.Full", check=False)
    assert done.code == 1 and "Traceback (most" not in done.err
    assert done.err.splitlines()[-1] == (
        "Error: CUDA out of memory. Tried to allocate 2.00 GiB. Lower forward_batch_size or "
        "rollout.max_rows, or set enable_activation_checkpointing=True: docs/hardware.md#memory."
    )
