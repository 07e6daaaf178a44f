"""A new user's mistakes end in one line that says what to do, before a weight is read."""

import re

import pytest
from runs import RECIPE, run, run_tiny, tiny_overrides, tune

CONFIG = "llama3_2_1B_lora_grpo"
SHORT = ["num_steps=1"]
MISTAKES = {
    "device=cuda": r"device=cuda: torch .* finds no GPU here",
    "rewards.0.weight=much": r"rewards\[0\].weight='much': should be a valid number",
    "max_generated_tokens=600": "max_generated_tokens=600: .*context of 512; give at most 4",
    "optimizer.lr=fast": "optimizer.lr='fast': not of type float",
    "model.num_layers=3": "model.num_layers=3: .*config.json .* says 2",
    "tokenizer.path=/no/such": "tokenizer.path=/no/such: no such file; `tune download",
    "output_dir=/dev/null/x": "output_dir=/dev/null/x: cannot be written to",
    "batch_size=13": r"batch_size \* ranks = 13 prompts a step, but dataset has only 12",
    "batch_size": "batch_size: not an override; write key=value",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_line(tmp_path, mistake):
    """The checkpoint is garbage, so that loading it would fail differently."""
    overrides = tiny_overrides(CONFIG, tmp_path)
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"garbage")
    done = tune("run", RECIPE, "--config", CONFIG, *overrides, mistake, cwd=tmp_path, check=False)
    assert done.code == 1
    (line,) = [line for line in done.err.splitlines() if line.startswith("Error")]
    assert done.err.endswith(f"{line}\n") and "Traceback (most" not in done.err
    assert re.match(f"Error: {MISTAKES[mistake]}", line), line
    assert len((done.out + done.err).splitlines()) <= 4


def test_all_mistakes_are_told_at_once_by_the_run_and_by_the_check(tmp_path):
    wrong = ["grpo_sample=4", "model.lora_rnk=4", "optimizer.lr=fast", "temperature=0"]
    overrides = [*tiny_overrides(CONFIG, tmp_path), *wrong]
    told = tune("run", RECIPE, "--config", CONFIG, *overrides, cwd=tmp_path, check=False).err
    keys = ["grpo_sample", "temperature", "model.lora_rnk", "optimizer.lr"]
    assert sorted(re.findall(r"^Error: ([\w.]+)=", told, re.M)) == sorted(keys)
    (tmp_path / "llama" / "model.safetensors").unlink()
    more = ["rewards.0.name=''", "eval_dataset.data_files=/no/such", "loss.kl_coeff=-1"]
    check = ["-m", "torchtune_grpo", "config", CONFIG, *overrides, *more]
    done = run(*check, cwd=tmp_path, check=False)
    assert done.code == 1 and not done.out
    keys += ["checkpointer.checkpoint_files", "loss.kl_coeff"]
    keys += ["rewards[0].name", "eval_dataset.data_files"]
    assert sorted(re.findall(r"^Error: ([\w.\[\]]+)", done.err, re.M)) == sorted(keys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("checkpointer.checkpoint_dir=5", "checkpointer.checkpoint_dir=5: not of type str"),
        ("~checkpointer.checkpoint_dir", "checkpointer.checkpoint_dir: missing"),
        ("tokenizer=no.such", "tokenizer._component_=no.such: cannot be imported"),
    ],
)
def test_the_check_survives_what_it_finds(tmp_path, change, told):
    """Later checks, which need the part that is wrong, are left out."""
    done = run("-m", "torchtune_grpo", "config", CONFIG, change, cwd=tmp_path, check=False)
    assert done.code == 1 and f"Error: {told}" in done.err and "Traceback" not in done.err


def test_an_error_is_told_where_its_traceback_cannot_be_written(tmp_path):
    """As on a full disk: a folder is in the file's place."""
    (tmp_path / "my_parts.py").write_text(
        "import os\n"
        "def wrong(prompts, completions, **columns):\n"
        "    os.makedirs('out/error.txt')\n"
        "    return [1.0]\n"
    )
    done = run_tiny(CONFIG, tmp_path, "rewards.0=my_parts.wrong", check=False)
    assert done.code == 1 and done.err.splitlines()[-1].startswith(
        "Error: The reward 'correctness'"
    )


def test_a_config_without_mistakes_is_said_to_be_so(tmp_path):
    overrides = tiny_overrides(CONFIG, tmp_path)
    done = run("-m", "torchtune_grpo", "config", CONFIG, *overrides, cwd=tmp_path)
    assert done.out.splitlines()[-1] == f"{CONFIG}: no mistake found."
    done = run("-m", "torchtune_grpo", "config", CONFIG, *overrides, "device=cuda", cwd=tmp_path)
    assert done.out.startswith("Note: device=cuda: torch")


def test_keys_that_follow_from_others_need_no_second_override(tmp_path):
    """12 rows in passes of at most 5, and no evaluation without its data set."""
    run_tiny(CONFIG, tmp_path, "batch_size=3", "grpo_samples=4", "forward_batch_size=5")
    run_tiny(CONFIG, tmp_path, "eval_dataset=null", *SHORT)


def test_the_traceback_is_in_a_file_or_asked_for(tmp_path):
    """And of an error that says nothing about the user's keys, always on the terminal."""
    (tmp_path / "my_parts.py").write_text(
        "import torch\n"
        "class Late(torch.optim.SGD):\n"
        "    def step(self):\n"
        "        raise KeyError('my bug')\n"
        "def wrong(prompts, completions, **columns):\n"
        "    return [1.0]\n"
    )
    reward = ["rewards.0=my_parts.wrong", "eval_dataset=null"]
    done = run_tiny(CONFIG, tmp_path, *reward, check=False)
    file = tmp_path / "out" / "error.txt"
    assert done.err.endswith(
        "Error: The reward 'correctness' returned 1 values for 8 completions; return one number "
        "or None per completion.\n"
    )
    assert f"Traceback: {file}" in done.err and "ContractError" in file.read_text()
    done = run_tiny(CONFIG, tmp_path, *reward, check=False, TORCHTUNE_GRPO_TRACEBACK="1")
    assert "Traceback (most recent call last)" in done.err
    done = run_tiny(CONFIG, tmp_path, "optimizer=my_parts.Late", *SHORT, check=False)
    assert "in step\n    raise KeyError('my bug')" in done.err
    assert done.err.endswith("Error: KeyError: 'my bug'\n")
    run_tiny(CONFIG, tmp_path, *SHORT)
    assert not file.exists()
