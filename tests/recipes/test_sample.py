"""`torchtune-grpo sample` shows what a policy says: base weights, then trained ones."""

import re

import pytest
from hf_models import hf_folder
from hf_tokenizers import write_tokenizer
from runs import LENGTH_REWARD, NO_EVALUATION, OF_LENGTH, Result, run, run_tiny, tiny_overrides

from torchtune_grpo.config.command_line import config_files

CONFIG = "llama3_2_1B_lora_grpo"
LATE_REWARD = """
def late(prompts, completions, *, trainer_state, log_extra, **columns):
    return [float(trainer_state.global_step)] * len(completions)
"""


def say(folder, *more: str, config: object = CONFIG, check: bool = True) -> Result:
    """Run ``torchtune-grpo sample`` with the tiny model's overrides."""
    start = ["-m", "torchtune_grpo", "sample", config]
    settings = [*tiny_overrides(str(config), folder), "dtype=fp32"]
    return run(*start, *settings, "--samples", "2", *more, cwd=folder, check=check)


def samples(text: str) -> str:
    return text[text.index("===") :]


@pytest.mark.slow
def test_shows_samples_of_base_and_trained_weights(tmp_path):
    question, shown = "2 plus 2?\x1b[2J", r"2 plus 2?\x1b[2J"
    base = say(tmp_path, "--prompt", question).out
    assert base.count("--- sample") == 2 and f"=== {shown}" in base and "\x1b" not in base
    assert str(tmp_path / "llama") in base
    (tmp_path / "my_rewards.py").write_text(LENGTH_REWARD)
    settings = ("dtype=fp32", "optimizer.lr=0.1", "lr_scheduler.num_warmup_steps=0", "num_steps=1")
    run_tiny(CONFIG, tmp_path, OF_LENGTH, *NO_EVALUATION, *settings)
    trained = say(tmp_path, "--prompt", question).out
    again = say(tmp_path, "--base", "--prompt", question).out
    assert "step_000001" in trained and samples(trained) != samples(base)
    assert samples(again) == samples(base)
    mine = tmp_path / "mine.yaml"  # of a recipe with a key of its own
    mine.write_text((config_files()[CONFIG]).read_text() + "max_rollouts: 3\n")
    (tmp_path / "late.py").write_text(LATE_REWARD)
    of_data = say(tmp_path, "--num-prompts", "2", "rewards=[late.late]", config=mine).out
    assert of_data.count("=== ") == 2 and of_data.count(", reward 1.000 (late 1)") == 4
    assert "Left out, as keys of another recipe: max_rollouts\n" in of_data
    # Weights that fit may still be read wrongly, as with another lora_alpha.
    for config, change, said in (
        (CONFIG, "model.lora_alpha=1", "model.lora_alpha=1: "),
        ("llama3_2_1B_full_grpo", "grpo_samples=2", "model._component_=torchtune.models.llama3_2."),
    ):
        done = say(tmp_path, "--prompt", question, change, config=config, check=False)
        (error,) = [line for line in done.err.splitlines() if line.startswith("Error: ")]
        assert done.code == 1 and said in error and error.endswith("training with --base.")
        assert "was made with" in error and "Traceback" not in done.err
    done = say(tmp_path, "--prompt", question, "temprature=1", check=False)
    assert done.code == 1 and "Did you mean temperature?" in done.err


def test_a_models_folder_can_be_sampled(tmp_path):
    hf_folder("qwen3", write_tokenizer(tmp_path / "model", "qwen3"), vocab_size=384)
    command = ["-m", "torchtune_grpo", "sample", "model"]
    small = ["device=cpu", "max_generated_tokens=4", "--samples", "2"]
    said = run(*command, "--prompt", "2 plus 2?", *small, cwd=tmp_path).out
    assert "Weights: model\n" in said and said.count("--- sample") == 2
    assert not (tmp_path / "model" / "samples").exists()
    done = run(*command, *small, cwd=tmp_path, check=False)
    assert done.err.endswith("rows in memory are gone; give --prompt.\n")


IN_MEMORY = """
from torchtune_grpo import GRPO

def longest(prompts, completions, gold, **columns):
    return [float(len(text)) for text in completions]

rows = [{"question": f"{n}+1=", "answer": {"gold": n}} for n in range(8)]
small = dict(num_steps=1, batch_size=2, grpo_samples=2, max_generated_tokens=4, device="cpu")
named = dict(prompt_column="question", columns={"gold": "answer.gold"}, prefill="<think>")
named["system_prompt"] = "Be brief."
given = dict(data=rows, rewards=[longest], output_dir="out", dataset=named, **small)
with GRPO("tiny_arithmetic_grpo", model_dir="tiny", **given) as run:
    run.train()
"""


FROM_PYTHON = """
from torchtune_grpo import GRPO

long = dict(max_generated_tokens=12, sampling={"min_new_tokens": 12})
run = GRPO(model_dir="out/step_000001", output_dir="a", device="cpu", **long)
print(*run.generate("3 + 4?"), sep="\\n", end="\\n--\\n")
for needs_data in (run.train, run.plan):
    try:
        needs_data()
    except ValueError as error:
        print(error)
"""


def test_a_checkpoint_is_asked_as_in_training(tmp_path):
    """By its folder alone, from Python, too; the card says how, and a key may say otherwise.

    The rows were in memory, and are gone.
    """
    (tmp_path / "train.py").write_text(IN_MEMORY)
    run("train.py", cwd=tmp_path)
    card = (tmp_path / "out/step_000001/README.md").read_text()
    assert "## How to ask it" in card and "- system_prompt: 'Be brief.'" in card
    assert "- prefill: '<think>'" in card and "prompt_template" not in card.partition("```yaml")[0]
    ask, of = ["-m", "torchtune_grpo", "sample"], ["--prompt", "3 + 4?", "--samples", "1"]
    of += ["device=cpu", "max_generated_tokens=12", "sampling.min_new_tokens=12"]
    said = run(*ask, "out/step_000001", *of, cwd=tmp_path).out
    assert re.search(r"tokens.*\n<think>", said) and "out/step_000001" in said
    (tmp_path / "mine.py").write_text(FROM_PYTHON)
    answer, refused = run("mine.py", cwd=tmp_path).out.split("\n--\n")
    assert said.endswith(f" tokens, cut off\n{answer}\n")
    assert refused == "model_dir=out/step_000001: to train it, give data.\n" * 2
    of_run = run(*ask, "out", *of, "dataset.prefill=So", cwd=tmp_path).out
    assert re.search(r"tokens.*\nSo", of_run) and "out/step_000001" in of_run
