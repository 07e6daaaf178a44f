"""A mistake ends in one line that says what is wrong, where, and what to write instead."""

import re

import pytest
from runs import RECIPE, TUNE, run

from torchtune_grpo.models import tiny

TINY = "tiny_arithmetic_grpo"
MODULE = '''
def no_completions(text): return 1.0
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
TURNS = '{"prompt": [{"role": "%s", "content": "3+4?"}], "answer": 7}\n'
MESSAGES = '[{""role"": ""user"", ""content"": ""3+4?""}]'
# Arguments of `torchtune-grpo config tiny_arithmetic_grpo`; {rows} is a data set with a file -> the
# last line, as far as it matters.
IN_A_CONFIG = {
    "resume_from_checkpoint=latest": "='latest': should be True or False, or 'auto'",
    "forward_batch_size=0": "=0: should be greater than 0, or 'auto'",
    "model=torchtune_grpo.models.lora_hf_model model.lora_rank=0": "lora_rank=0: give 1 or more",
    "sampling.temperature=1": "unknown config key. Did you mean temperature?",
    "sampling=3": "sampling is a section; set sampling.top_k, .* or sampling.stop_strings",
    "lr_scheduler=cosine": "mean torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup?",
    "optimizer=adamw": "not an import path such as torch.optim.AdamW. Did you mean torch.optim.Ad",
    "rollout.engine=note": r"not an import path .* Did you mean native\?",  # and not ``noted``
    "metric_logger=tensorboard": "mean torchtune.training.metric_logging.TensorBoardLogger?",
    "--table my.Table": "--table=my.Table: my has no 'Table'",
    "rewards.0.foo=1": r"torchtune_grpo.rewards.math_correctness_reward has no such argument\.",
    "rewards.correctness.weight=1": "rewards has only rewards.0, rewards.1",
    "rewards=[] rewards.0._component_=x": r"rewards has no entry; give rewards=\[...\]",
    "rewards.0=my.verl": r"my.verl has no argument `completions`; write f\(prompts, completions, ",
    "rewards.0=my.no_completions": r"write f\(prompts, completions, \*\*columns\)",
    "rewards.0=my.verk": r"my has no 'verk'\. Did you mean my.verl\?",
    "rewards.0=broken.f": r"cannot be imported: '\[' was never closed \(broken.py:2\)",
    "rewards.0=fails.f": r"cannot be imported: ZeroDivisionError: division by zero \(fails.py:2\)",
    "rewards.0.weight=-1": "rewards.0.weight=-1: wrong answers would score above right ones",
    "tools=[my.add]": "tools: the chat template describes no tools. Train a model with the form of",
    "dataset={one.jsonl} dataset.path=x": "dataset.path='x': .* source names the file",
    "dataset={one.jsonl} dataset.shuffle=true": "in a random order anyway, unless sampler says",
    "dataset={https://x.org/a.jsonl}": "download the file, and give its path",
    "dataset={one.jsonl} dataset.split=tran": "the file has no splits; use train",
    "dataset={latin.csv}": "the file is not in UTF-8; set encoding, as to latin-1 or utf-16",
    "dataset={wide.csv}": "the file is not in UTF-8; set encoding, as to latin-1 or utf-16",
    "dataset={semicolon.csv}": "its header has no ','; set sep=';'",
    "dataset={messages.csv}": "column 'prompt' holds messages as text; give JSON lines with lists",
    "dataset={roles.jsonl}": r"message 0 has role='human': give one of .* \(8 rows, first 0\)",
    "dataset={one.jsonl} dataset.prompt_template={sum}{prompt}": "no column 'sum' among",
    "sampler.column=level": "sampler={'column': 'level'}: give a mapping with _component_",
    r"dataset={one.jsonl} dataset.prompt_template=x{prompt}\boxed{}": "literal braces as {{ and }}",
    f"dataset={{indices.jsonl}} {CHOICES}": r": answer=0: give a letter, .* \(8 rows, first 0\)\.",
    f"dataset={{lists.jsonl}} {CHOICES}": r": answer=\[0\]: give a letter, .*8 rows, first 0\)",
}
# Other commands
COMMANDS = {
    "torchtune-grpo train": r"usage: torchtune-grpo train CONFIG \[key=value ...\]",
    f"torchtune-grpo train --config {TINY} num_stepz=1": "Did you mean num_steps?",
    f"torchtune-grpo train {TINY} num_stepz=1": "Did you mean num_steps?",
    f"torchtune-grpo plan {TINY} num_stepz=1": "Did you mean num_steps?",
    f"torchtune-grpo plan --config {TINY} num_stepz=1": "Did you mean num_steps?",
    "torchtune-grpo evalute x": "evalute: no such command. Did you mean evaluate?",
    "torchtune-grpo evaluate": "error: name a shipped config, a file, or the folder of a run",
    "torchtune-grpo score": "error: name a shipped config, a file, or the folder of a run",
    "torchtune-grpo evaluate empty": "empty: no run, as it has no torchtune_config.yaml; give the",
    "torchtune-grpo evaluate run/step_000002": "a folder of a run; give run and --checkpoint step_",
    "torchtune-grpo config tiny_llama": "a model, and no run; give a config and model_dir=tiny_lla",
    "torchtune-grpo sample Qwen/Qwen3-0.6B": "no such file, run or shipped config. `tune ls` lists",
    "torchtune-grpo config tiny_arithmetic_grp": f"Did you mean {TINY}?",
    "torchtune-grpo config base.yaml": f"base_config=tiny_arithmetic_grp: .* Did you mean {TINY}?",
    "torchtune-grpo config mapping.yaml": "rewards: a mapping; give a list, each entry behind a da",
    f"torchtune-grpo sample {TINY} What?": r"What\?: not key=value; for a prompt, write --prompt ",
    f"torchtune-grpo sample {TINY} --samples 0": "argument --samples: 0: give 1 or more",
    f"torchtune-grpo sample {TINY} --num-prompts -1": "argument --num-prompts: -1: give 1 or more",
    f"torchtune-grpo evaluate {TINY} --output no/x": "--output=no/x: name a file in a folder",
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
        "base.yaml": "base_config: tiny_arithmetic_grp\n",
        "good.yaml": f"base_config: {TINY}\n",
        "mapping.yaml": f"base_config: {TINY}\nrewards: {{right: {{_component_: {SHAPED}}}}}\n",
        "one.jsonl": row % (3, 7),
        "indices.jsonl": "".join(row % (n, n % 4) for n in range(8)),
        "lists.jsonl": "".join(row.replace("%d}", "[%d]}") % (n, n % 4) for n in range(8)),
        "roles.jsonl": "".join(TURNS % ["human", "bot"][n % 2] for n in range(8)),
        "semicolon.csv": "prompt;answer\n3 + 4?;7\n",
        "messages.csv": f'prompt,answer\n"{MESSAGES}",7\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin.csv").write_bytes("prompt,answer\nWas heißt 3 + 4?,7\n".encode("latin-1"))
    (folder / "wide.csv").write_bytes("prompt,answer\n3 + 4?,7\n".encode("utf-16"))
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
