"""The record that a run of arithmetic leaves in its folder, made up without training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchtune_grpo.monitor.record import COMPLETIONS_FILE, RUN_FILE

HOSTILE = (
    "</script><script>window.broken=1</script><img src=x onerror='window.broken=1'>"
    "<!--<script>\x1b[31mred\x1b[0m \u202eright to left\u202c \u200f\u2028 \ud800 $$x$$ `${1}` "
    "{{js}} \\u003c 😀 \x00 \r end"
)
NUM_PROBLEMS = 128  # held out
METRICS = """
reward reward_std_in_group frac_informative_groups rewards/correctness/mean rewards/format/mean
completions/mean_length completions/min_length completions/max_length completions/clipped_ratio
entropy kl sampling/sampling_logp_difference/mean clip_ratio/region_mean grad_norm num_tokens
step_time time/rollout time/reward time/logprobs time/update
""".split()


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write a record's lines."""
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def write_run(
    folder: Path, *, steps: int = 12, group_size: int = 8, text: str | None = None
) -> Path:
    """Write a run whose accuracy rises to 0.95; ``text`` stands for every completion."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"num_steps": steps, "optimizer": {"lr": 3e-4}}
    config["rewards"] = [{"name": "correctness"}, {"name": "format", "weight": 0.1}]
    start = {"kind": "start", "step": 0, "config": config, "versions": {"torch": "2.13.0"}}
    start |= {"decider": "correctness", "forms": ["format"]}
    start |= dict.fromkeys(("time", "command", "device", "ranks", "seed"), "some")
    resumed = {**start, "step": steps // 2, "config": config | {"optimizer": {"lr": 1e-4}}}
    events, completions = [start], []
    for step in range(steps + 1):
        skill = 0.1 + 0.85 * step / steps
        if step % max(1, steps // 6) == 0:
            right = [float(number < skill * NUM_PROBLEMS) for number in range(NUM_PROBLEMS)]
            events.append(evaluation(step, **{name: right for name in ("accuracy", "pass@1")}))
        if step > 0:
            # Six of 24 prompts, and the completions to two of them.
            prompts = [(step * 6 + number) % 24 for number in range(6)]
            rates = [round(8 * skill) / 8] * len(prompts)
            of_groups = {"prompt_index": prompts, "pass_rate": rates, "reward": rates}
            metrics = dict.fromkeys(METRICS, skill + 0.03 * math.sin(step))
            events.append({"kind": "step", "step": step, **metrics, "prompts": of_groups})
            completions += _completions(step, skill, prompts[:2], group_size, text)
    write_lines(folder / RUN_FILE, [*events, *(FINDINGS if steps >= 10 else []), resumed])
    write_lines(folder / COMPLETIONS_FILE, completions)
    return folder


def write_hostile_run(folder: Path) -> Path:
    """Write a run with a hostile text in completions, prompts, columns, rewards and findings."""
    folder = write_run(folder, steps=2, group_size=2, text=HOSTILE)
    events = [json.loads(line) for line in (folder / RUN_FILE).read_text("utf-8").splitlines()]
    changed = {f"rewards/{HOSTILE}/mean": 0.5, "rewards/$$x$$/mean": 0.5}
    changed |= {"command": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    texts = dict.fromkeys(("name", "evidence", "key", "remedy"), HOSTILE)
    finding = {"kind": "finding", "step": 1, "since": 1, "event": "begins", **texts}
    write_lines(folder / RUN_FILE, [*({**event, **changed} for event in events), finding])
    hostile = {"prompt": HOSTILE, "columns": {HOSTILE: HOSTILE}, "extra": {HOSTILE: [HOSTILE]}}
    hostile |= {"rewards": {HOSTILE: 1.0}, "failed": [HOSTILE], "completion": HOSTILE}
    write_lines(folder / COMPLETIONS_FILE, [completion(n, 1.0, 1.0, **hostile) for n in (0, 1)])
    return folder


def _finding(step: int, event: str, name: str, since: int, key: str, remedy: str) -> dict[str, Any]:
    found = {"kind": "finding", "step": step, "event": event, "name": name, "since": since}
    return {**found, "evidence": "93 % of five steps.", "key": key, "remedy": remedy}


FINDINGS = [
    _finding(5, "begins", "truncated", 3, "max_generated_tokens", "Set max_generated_tokens."),
    _finding(8, "begins", "same_texts", 7, "temperature", "Set temperature."),
    _finding(9, "ends", "truncated", 3, "max_generated_tokens", "Set max_generated_tokens."),
]


def evaluation(step: int, **by_prompt: list[float]) -> dict[str, Any]:
    """Make the event of an evaluation from each prompt's numbers; the intervals are made up."""
    event: dict[str, Any] = {"kind": "evaluation", "step": step, "time/eval": 3.0}
    for name, values in by_prompt.items():
        mean = sum(values) / len(values)
        event |= {f"eval/{name}": mean, f"eval/{name}/low": max(0, mean - 0.05)}
        event[f"eval/{name}/high"] = min(1, mean + 0.05)
    event |= {"eval/mean_length": 31.0, "eval/clipped_ratio": 0.0}
    indices = list(range(len(by_prompt["accuracy"])))
    return event | {"prompts": {"prompt_index": indices, **by_prompt}}


def completion(sample: int, correct: float | None, formed: float, **more: Any) -> dict[str, Any]:
    """Make a completion's line, with both rewards' scores."""
    row: dict[str, Any] = {"step": 1, "prompt_index": 4, "sample": sample, "prompt": "p"}
    row |= {"completion": "c", "tokens": 1, "ended": "stop_token", "columns": {}, "extra": {}}
    row |= {"reward": 1.0, "rewards": {"correctness": correct, "format": formed}, "failed": []}
    return row | {"advantage": 0.5, "sampler_logprob": None, "trainer_logprob": None} | more


def _completions(
    step: int, skill: float, prompts: list[int], group_size: int, text: str | None
) -> list[dict[str, Any]]:
    """Make whole groups: some samples right, some well-formed, some cut off, and one failed."""
    return [
        completion(
            sample,
            correct=float(sample < skill * group_size),
            formed=float((sample + step) % 5 > 0),
            step=step,
            prompt_index=number,
            prompt=f"What is {number} + 7?",
            completion=(f"<answer>{number + sample}</answer>" if sample else "")
            if text is None
            else text,
            ended="length" if sample == group_size - 1 and step % 4 == 0 else "stop_token",
            advantage=float(sample < skill * group_size) - skill,
            failed=["format"] if (sample, step) == (3, 2) else [],
            sampler_logprob=-0.31,
            trainer_logprob=-0.31 - 0.001 * sample,
        )
        for number in prompts
        for sample in range(group_size)
    ]
