"""The record that a run of arithmetic leaves in its folder, made up without training."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torchtune_grpo.monitor.record import COMPLETIONS_FILE, RUN_FILE

HOSTILE = (
    "</script><script>window.broken=1</script><img src=x onerror='window.broken=1'>"
    "<!--<script>\x1b[31mred\x1b[0m \u202eright to left\u202c \u200f\u2028 \ud800 $$x$$ `${1}` "
    "{{js}} \\u003c 😀 \x00 \r end"
)


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes a record's lines."""
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def write_run(
    folder: Path,
    *,
    steps: int = 30,
    group_size: int = 8,
    text: str | None = None,
    final: float = 0.95,
    seed: int = 0,
) -> Path:
    """A run whose accuracy rises to ``final``; ``text`` stands for every completion."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    config = {
        "output_dir": str(folder),
        "num_steps": steps,
        "grpo_samples": group_size,
        "seed": seed,
        "optimizer": {"lr": 3e-4},
        "eval_dataset": {"levels": [1, 2, 3]},
        "rewards": [{"name": "correctness", "weight": 1.0}, {"name": "format", "weight": 0.1}],
    }
    start = {
        "kind": "start",
        "step": 0,
        "time": "2026-11-22T12:00:00+00:00",
        "command": f"tune run grpo_full_finetune_single_device output_dir={folder}",
        "config": config,
        "versions": {"torch": "2.13.0", "torchtune": "0.6.1"},
        "device": "cpu",
        "ranks": 1,
        "seed": seed,
    }
    resumed = json.loads(json.dumps(start)) | {"step": steps // 2}
    resumed["config"]["optimizer"]["lr"] = 1e-4
    events = [start, *_evaluations(steps=steps, final=final, rng=rng)]
    groups = _groups(steps=steps, group_size=group_size, text=text, rng=rng)
    completions = []
    for event, (results, rows) in zip(_steps(steps=steps, final=final, rng=rng), groups):
        events.append({**event, "prompts": results})
        completions += rows
    if steps >= 10:
        events += FINDINGS
    events.sort(key=lambda event: (event["step"], event["kind"] == "finding"))
    write_lines(folder / RUN_FILE, [*events, resumed])
    write_lines(folder / COMPLETIONS_FILE, completions)
    return folder


TRUNCATED = {
    "kind": "finding",
    "name": "truncated",
    "since": 3,
    "evidence": "93 % of the responses of steps 3 to 7 were cut off at 48 tokens.",
    "key": "max_generated_tokens",
    "remedy": "Set max_generated_tokens to 96 or more.",
}
SLOW = {
    "kind": "finding",
    "name": "rewards_slow",
    "since": 7,
    "evidence": "The rewards took 71 % of the last 10 steps' time.",
    "key": "rewards.0.workers",
    "remedy": "Set workers of the reward correctness to 4.",
}
FINDINGS = [
    {"step": 5, "event": "begins", **TRUNCATED},
    {"step": 8, "event": "begins", **SLOW},
    {"step": 9, "event": "ends", **TRUNCATED},
]


def _skill(step: int, steps: int, final: float) -> float:
    return 0.1 + (final - 0.1) * min(1, step / max(1, steps * 0.7))


def _steps(*, steps: int, final: float, rng: random.Random) -> Iterator[dict[str, Any]]:
    for step in range(1, steps + 1):
        skill = _skill(step, steps, final)
        right = skill + rng.gauss(0, 0.03)
        yield {
            "kind": "step",
            "step": step,
            "reward": right + 0.08,
            "reward_std_in_group": 0.45 * (1 - skill) + 0.05,
            "frac_informative_groups": max(0.0, 0.9 - skill * 0.6),
            "rewards/correctness/mean": right,
            "rewards/format/mean": min(1.0, 0.5 + skill),
            "completions/mean_length": 30 + rng.gauss(0, 1),
            "completions/min_length": 18,
            "completions/max_length": 48,
            "completions/clipped_ratio": max(0.0, 0.2 - skill * 0.2),
            "entropy": 0.5 - 0.3 * skill + rng.gauss(0, 0.01),
            "kl": 0.02 * skill,
            "sampling/sampling_logp_difference/mean": 1e-6,
            "clip_ratio/region_mean": 0.001,
            "grad_norm": 0.4 + abs(rng.gauss(0, 0.1)),
            "num_tokens": 9000 * step,
            "step_time": 2.0,
            "time/rollout": 1.2,
            "time/reward": 0.1,
            "time/logprobs": 0.1,
            "time/update": 0.6,
        }


def evaluation(step: int, **by_prompt: list[float]) -> dict[str, Any]:
    """The event of an evaluation, from each prompt's numbers; the intervals are made up."""
    event: dict[str, Any] = {"kind": "evaluation", "step": step, "time/eval": 3.0}
    for name, values in by_prompt.items():
        mean = sum(values) / len(values)
        event |= {f"eval/{name}": mean, f"eval/{name}/low": max(0, mean - 0.05)}
        event[f"eval/{name}/high"] = min(1, mean + 0.05)
    event |= {"eval/mean_length": 31.0, "eval/clipped_ratio": 0.0}
    indices = list(range(len(by_prompt["accuracy"])))
    return event | {"prompts": {"prompt_index": indices, **by_prompt}}


def _evaluations(*, steps: int, final: float, rng: random.Random) -> Iterator[dict[str, Any]]:
    difficulty = [rng.random() for _ in range(128)]
    for step in range(0, steps + 1, max(1, steps // 6)):
        skill = _skill(step, steps, final)
        samples = [[float(rng.random() < skill) for _ in range(4)] for _ in difficulty]
        by_prompt = {
            "accuracy": [float(skill > each * 0.98) for each in difficulty],
            "pass@1": [sum(each) / 4 for each in samples],
            "pass@4": [max(each) for each in samples],
        }
        yield evaluation(step, **by_prompt)


def _groups(
    *, steps: int, group_size: int, text: str | None, rng: random.Random
) -> Iterator[tuple[dict[str, list[Any]], list[dict[str, Any]]]]:
    """Of each step the results of six groups, and the completions of two."""
    for step in range(1, steps + 1):
        seen = [(step * 6 + number) % 24 for number in range(6)]
        skill = [min(1, step / steps + 0.1 * rng.random()) for _ in seen]
        rates = [round(group_size * each) / group_size for each in skill]
        rewards = [rate + 0.1 for rate in rates]
        results = {"prompt_index": seen, "pass_rate": rates, "reward": rewards}
        rows = []
        for number, rate in list(zip(seen, rates))[:2]:
            for sample in range(group_size):
                right = sample < rate * group_size
                formed = (sample + step) % 5 > 0
                cut = sample == group_size - 1 and step % 4 == 0
                answer = number + 7 if right else number + sample
                said = f"{number} + 7 = {answer}</think> <answer>{answer}</answer>"
                rows.append(
                    {
                        "step": step,
                        "prompt_index": number,
                        "sample": sample,
                        "prompt": f"What is {number} + 7?\n<think>",
                        "columns": {"answer": str(number + 7)},
                        "completion": said if text is None else text,
                        "tokens": 48 if cut else 34,
                        "ended": "length" if cut else "stop_token",
                        "reward": right + 0.1 * formed,
                        "rewards": {"correctness": float(right), "format": float(formed)},
                        "failed": ["format"] if sample == 3 and step == 2 else [],
                        "advantage": (right - rate) * 2,
                        "sampler_logprob": -0.31,
                        "trainer_logprob": -0.31 - 0.001 * sample,
                        "extra": {"read as": answer},
                    }
                )
        yield results, rows
