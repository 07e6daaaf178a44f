"""Findings that real runs of the tiny random model provoke, and what they leave.

tests/unit/test_findings.py has each one's threshold.
"""

import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from runs import NO_EVALUATION, RECIPE, Result, distance, random_tiny_llama, tune, weights

from torchtune_grpo.config.check import read_config
from torchtune_grpo.monitor.findings import Watch
from torchtune_grpo.monitor.record import STILL_THE_BASE, read

PARTS = '''
import uuid

def quarter(prompts, completions, **columns):
    return [0.25] * len(completions)

def brevity(prompts, completions, completion_ids, **columns):
    return [-len(ids) / 24 for ids in completion_ids]

def right(prompts, completions, **columns):
    return [1.0] * len(completions)

def gives_none(prompts, completions, **columns):
    return [None] * len(completions)

def fails(prompts, completions, **columns):
    return [1.0, float("nan")] * (len(completions) // 2)

def odd(prompts, completions, completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]  # never, of eight equal tokens

def broken() -> str:
    """Looks."""
    raise OSError("no connection")

class Fickle:
    def reset(self, answer, **row):
        if int(answer) % 5 == 1:
            raise OSError("no connection")
        return f" {uuid.uuid4().int % 1000}"

    def look(self) -> str:
        """Looks."""
        return ""
'''
SHORT = ["num_steps=3", "batch_size=8", "grpo_samples=2", "max_generated_tokens=9"]
SHORT += ["sampling.stop_strings=[e,o,a,i,' ','1','2','3']", *NO_EVALUATION]  # few are cut off
CALL = '<tool_call>{"name": "broken", "arguments": {}}</tool_call>'
TOOLS = ["tools=[provoking.broken]", "num_steps=5", "environment.max_turns=2", *SHORT[1:]]
TOOLS += ["environment.max_response_tokens=150"]
TEMPLATE = """{% if tools %}{% endif %}{{ bos_token }}{% for message in messages %}\
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim }}\
{% for call in message.tool_calls or [] %}\
{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}\
{% endfor %}{{ '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}\
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""


def rewards(*names: str) -> str:
    return f"rewards=[{','.join(f'{{_component_: provoking.{name}}}' for name in names)}]"


# Of each run: its overrides, and the findings that it provokes.
RUNS = {
    # What is paid for is to say nothing, at once.
    "collapse": (
        [rewards("quarter", "brevity"), "num_steps=22", "batch_size=4", "grpo_samples=8"]
        + ["max_generated_tokens=24", "optimizer.lr=1e-2", "loss.kl_coeff=0.001"]
        + ["evaluation.every_n_steps=3", "evaluation.samples=0", "eval_dataset.num_samples=2"],
        "kl_runaway reward_hacking entropy_collapsed same_texts reward_constant responses_shrink",
    ),
    "nothing_works": (
        [rewards("right", "gives_none", "fails"), "max_reward_failure_share=1"]
        + ["num_steps=7", "saving.every_n_steps=4"]
        + ["batch_size=16", "grpo_samples=2", "max_generated_tokens=2", "sampling.min_new_tokens=2"]
        + ["objective.mask_truncated_completions=true", *NO_EVALUATION],
        "all_right nothing_trained reward_fails reward_constant",
    ),
    "fickle": (
        [rewards("odd"), "environment=provoking.Fickle", *SHORT],
        "environment_fails prompts_differ",
    ),
    # The prompt ends with a call, or without.
    "calls": ([rewards("odd"), *TOOLS, f"dataset.prefill='{CALL}'"], "calls_fail"),
    "no_calls": ([rewards("odd"), *TOOLS], "tools_unused"),
}


def events(folder: Path) -> list[dict]:
    """Return the recorded findings; a watch of the other events must find the same."""
    cfg = read_config(OmegaConf.load(folder / "torchtune_config.yaml"))
    names = [node.get("name") or node._component_.rpartition(".")[2] for node in cfg.rewards]
    watch = Watch(cfg, dict.fromkeys(names), decider=names[0])
    found = [
        finding for event in read(folder, "step", "evaluation") for finding in watch.add(event)
    ]
    assert read(folder, "finding") == found
    return found


def start(name: str, folder: Path, *more: str) -> Result:
    overrides, _ = RUNS[name]
    common = ["--config", "tiny_arithmetic_grpo", "model_dir=tiny_llama", "lr_scheduler=null"]
    common += ["output_dir=out", "dataset.num_samples=64"]
    return tune("run", RECIPE, *common, *overrides, *more, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_provokes_its_findings(tmp_path, monkeypatch, name):
    """And says on the terminal, the page and the model card if it has left the base as it was."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "provoking.py").write_text(PARTS)
    random_tiny_llama(tmp_path)
    (tmp_path / "tiny_llama/chat_template.jinja").write_text(TEMPLATE)
    done, out = start(name, tmp_path), tmp_path / "out"
    begun = {each["name"] for each in events(out) if each["event"] == "begins"}
    assert {*RUNS[name][1].split()} <= begun
    checkpoint = max(out.glob("step_*"))
    card, page = (checkpoint / "README.md").read_text(), (out / "run.html").read_text()
    is_base = name == "nothing_works"  # in which no group's advantages differ
    assert [STILL_THE_BASE in text for text in (done.err, card, page)] == [is_base] * 3
    assert not is_base or distance(weights(checkpoint), weights(tmp_path / "tiny_llama")) == 0
    if name == "nothing_works":
        check_that_a_resumed_run_finds_the_same(tmp_path)


def check_that_a_resumed_run_finds_the_same(folder: Path) -> None:
    """Also findings that began earlier, and signs that had not lasted long enough."""
    once = lasting(folder)
    shutil.rmtree(folder / "out" / "step_000007")
    start("nothing_works", folder, "resume_from_checkpoint=true")
    again = lasting(folder)
    assert again == once
    assert {(step > 4, since) for step, _, _, since in again} == {(False, 1), (True, 1)}


def lasting(folder: Path) -> list[tuple]:
    """What was found, and when."""
    keys = ("step", "event", "name", "since")
    return [tuple(each[key] for key in keys) for each in events(folder / "out")]
