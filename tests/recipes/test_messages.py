"""A mistake ends in one line that says what is wrong, where, and what to write instead."""

import re

import pytest
from omegaconf import OmegaConf
from runs import NO_EVALUATION, RECIPE, TUNE, run, run_tiny, tiny_overrides, tune

from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.models import tiny

TINY = "tiny_arithmetic_grpo"
MODULE = '''
def verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0
def add(x: int) -> int:
    """Adds one.

    Args:
        x: A number.
    """
    return x + 1
'''
ROWS = "{_component_: torchtune_grpo.data.RLDataset, source: %s}"
CHOICES = "rewards=[{_component_: torchtune_grpo.rewards.choice_reward}]"
SHAPED = "torchtune_grpo.rewards.math_format_reward"
MESSAGES = '[{""role"": ""user"", ""content"": ""3+4?""}]'
# Arguments of `torchtune-grpo config tiny_arithmetic_grpo`; {rows} is a data set with a file -> the
# last line, as far as it matters.
IN_A_CONFIG = {
    "resume_from_checkpoint=latest": "='latest': should be True or False, or 'auto'",
    "forward_batch_size=0": "=0: should be greater than 0, or 'auto'",
    "model=torchtune_grpo.models.lora_hf_model model.lora_rank=0": "lora_rank=0: give 1 or more",
    "lr_scheduler=cosine": "mean torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup?",
    "rollout.engine=note": r"not an import path .* Did you mean native\?",  # and not ``noted``
    "--table my.Table": "--table=my.Table: my has no 'Table'",
    "rewards.0.foo=1": r"torchtune_grpo.rewards.math_correctness_reward has no such argument\.",
    "rewards=[] rewards.0._component_=x": r"rewards has no entry; give rewards=\[...\]",
    "rewards.0=my.verk": r"my has no 'verk'\. Did you mean my.verl\?",
    "rewards.0=broken.f": r"cannot be imported: '\[' was never closed \(broken.py:2\)",
    "rewards.0=fails.f": r"cannot be imported: ZeroDivisionError: division by zero \(fails.py:2\)",
    "rewards.0.weight=-1": "rewards.0.weight=-1: wrong answers would score above right ones",
    "tools=[my.add]": "tools: the chat template describes no tools. Train a model with the form of",
    "dataset={one.jsonl} dataset.path=x": "dataset.path='x': .* source names the file",
    "dataset={one.jsonl} dataset.shuffle=true": "in a random order anyway, unless sampler says",
    "dataset={https://x.org/a.jsonl}": "download the file, and give its path",
    "dataset={latin.csv}": "the file is not in UTF-8; set encoding, as to latin-1 or utf-16",
    "dataset={semicolon.csv}": "its header has no ','; set sep=';'",
    "dataset={messages.csv}": "column 'prompt' holds messages as text; give JSON lines with lists",
    "sampler.column=level": "sampler={'column': 'level'}: give a mapping with _component_",
    f"dataset={{indices.jsonl}} {CHOICES}": r": answer=0: give a letter, .* \(8 rows, first 0\)\.",
}
# Other commands
COMMANDS = {
    "torchtune-grpo train": r"usage: torchtune-grpo train CONFIG \[key=value ...\]",
    f"torchtune-grpo train --config {TINY} num_stepz=1": "Did you mean num_steps?",
    f"torchtune-grpo plan {TINY} num_stepz=1": "Did you mean num_steps?",
    "torchtune-grpo evalute x": "evalute: no such command. Did you mean evaluate?",
    "torchtune-grpo evaluate": "error: name a shipped config, a file, or the folder of a run",
    "torchtune-grpo evaluate empty": "empty: no run, as it has no torchtune_config.yaml; give the",
    "torchtune-grpo evaluate run/step_000002": "a folder of a run; give run and --checkpoint step_",
    "torchtune-grpo config tiny_llama": "a model, and no run; give a config and model_dir=tiny_lla",
    "torchtune-grpo sample Qwen/Qwen3-0.6B": "no such file, run or shipped config. `tune ls` lists",
    "torchtune-grpo config tiny_arithmetic_grp": f"Did you mean {TINY}?",
    "torchtune-grpo config mapping.yaml": "rewards: a mapping; give a list, each entry behind a da",
    f"torchtune-grpo sample {TINY} What?": r"What\?: not key=value; for a prompt, write --prompt ",
    f"torchtune-grpo sample {TINY} --samples 0": "argument --samples: 0: give 1 or more",
    f"tune run {RECIPE} --config {TINY} device=mps": "device=mps: is not available here; give cpu",
    f"tune run {RECIPE} --config=good.yaml num_stepz=1": "Did you mean num_steps?",
    f"tune run {RECIPE[:-1]} --config {TINY}": f"no recipe of this name, .* Did you mean {RECIPE}?",
    f"tune run nosuch.py --config {TINY}": "nosuch.py: no recipe of this name, and no file.$",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    tiny.prepare(folder / "tiny_llama")
    for name in ("empty", "run/step_000002"):
        (folder / name).mkdir(parents=True)
    row = '{"prompt": "%d + 4?", "answer": %d}\n'
    texts = {
        "my.py": MODULE,
        "broken.py": "def f(prompts, completions, **columns):\n    return [1.0\n",
        "fails.py": "def f(prompts, completions, **columns): ...\nnumber = 1 / 0\n",
        "run/torchtune_config.yaml": "",
        "good.yaml": f"base_config: {TINY}\n",
        "mapping.yaml": f"base_config: {TINY}\nrewards: {{right: {{_component_: {SHAPED}}}}}\n",
        "one.jsonl": row % (3, 7),
        "indices.jsonl": "".join(row % (n, n % 4) for n in range(8)),
        "semicolon.csv": "prompt;answer\n3 + 4?;7\n",
        "messages.csv": f'prompt,answer\n"{MESSAGES}",7\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin.csv").write_bytes("prompt,answer\nWas heißt 3 + 4?,7\n".encode("latin-1"))
    return folder


def last_line(*command, cwd):
    """What a command that fails says last, and that it says it without a traceback."""
    done = run(*command, cwd=cwd, check=False)
    assert done.code != 0 and "Traceback" not in done.out + done.err, done.err
    return done.err.splitlines()[-1]


@pytest.mark.parametrize("mistake", IN_A_CONFIG)
def test_a_mistake_in_a_config(folder, mistake):
    path = f"model_dir={folder / 'tiny_llama'}"
    given = re.sub(r"\{(\S+\.\w+)\}", lambda file: ROWS % file[1], mistake)
    words = re.findall(r"(?:\{.*?\}(?= |$)|\[\{.*\}\]|\S)+", given)
    command = ["-m", "torchtune_grpo", "config", TINY, "output_dir=out", "eval_dataset=null"]
    line = last_line(*command, "batch_size=1", path, *words, cwd=folder)
    assert re.search(IN_A_CONFIG[mistake], line), line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_in_a_command(folder, command):
    program, *words = command.split()
    start = [TUNE] if program == "tune" else ["-m", "torchtune_grpo"]
    line = last_line(*start, *words, cwd=folder)
    assert re.search(COMMANDS[command], line), line


# --- Before a weight is read, and in the middle of a run ---------------------------------------

CONFIG = "llama3_2_1B_lora_grpo"
SHORT = ["num_steps=1", *NO_EVALUATION]
MISTAKES = {
    "output_dir=/dev/null/x": "output_dir=/dev/null/x: cannot be written to",
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
