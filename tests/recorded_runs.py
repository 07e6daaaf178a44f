"""The files that a run of arithmetic leaves in its folder, made up without training."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HOSTILE = (
    "</script><script>window.broken=1</script><img src=x onerror='window.broken=1'>"
    "<!--<script>\x1b[31mred\x1b[0m \u202eright to left\u202c \u200f\u2028 \ud800 $$x$$ `${1}` "
    "{{js}} \\u003c 😀 \x00 \r end"
)


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """As the run's log writes them."""
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def write_run(
    folder: Path,
    *,
    steps: int = 30,
    num_steps: int | None = None,
    prompts: int = 24,
    held_out: int = 128,
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
        "num_steps": num_steps or steps,
        "grpo_samples": group_size,
        "seed": seed,
        "optimizer": {"lr": 3e-4},
        "eval_dataset": {"levels": [1, 2, 3]},
        "rewards": [{"name": "correctness", "weight": 1.0}, {"name": "format", "weight": 0.1}],
    }
    start = {
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
    write_lines(folder / "starts.jsonl", [start, resumed])
    _write_metrics(folder, steps=steps, held_out=held_out, final=final, rng=rng)
    _write_completions(
        folder, steps=steps, prompts=prompts, group_size=group_size, text=text, rng=rng
    )
    finding = {
        "name": "truncated",
        "since": 3,
        "evidence": "93 % of the responses of steps 3 to 7 were cut off at 48 tokens.",
        "key": "max_generated_tokens",
        "remedy": "Set max_generated_tokens to 96 or more.",
    }
    dominant = {
        "name": "stage_dominates",
        "since": 7,
        "evidence": "The rewards took 71 % of the last 10 steps' time.",
        "key": "rewards.0.workers",
        "remedy": "Set workers of the reward correctness to 4.",
    }
    if steps >= 10:
        write_lines(
            folder / "findings.jsonl",
            [
                {"step": 5, "event": "begins", **finding},
                {"step": 8, "event": "begins", **dominant},
                {"step": 9, "event": "ends", **finding},
            ],
        )
    return folder


def _write_metrics(
    folder: Path, *, steps: int, held_out: int, final: float, rng: random.Random
) -> None:
    lines, evaluations, tokens = [], [], 0
    difficulty = [rng.random() for _ in range(held_out)]
    for step in range(steps + 1):
        skill = 0.1 + (final - 0.1) * min(1, step / max(1, steps * 0.7))
        if step:
            tokens += 9000
            right = skill + rng.gauss(0, 0.03)
            lines.append(
                {
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
                    "num_tokens": tokens,
                    "step_time": 2.0,
                    "time/rollout": 1.2,
                    "time/reward": 0.1,
                    "time/logprobs": 0.1,
                    "time/update": 0.6,
                }
            )
        if step % max(1, steps // 6) == 0:
            greedy = [float(skill > each * 0.98) for each in difficulty]
            samples = [[float(rng.random() < skill) for _ in range(4)] for _ in greedy]
            evaluations.append(
                {
                    "step": step,
                    "reward": "correctness",
                    "prompt_index": list(range(held_out)),
                    "greedy": greedy,
                    "samples": samples,
                }
            )
            line: dict[str, Any] = {"step": step, "time/eval": 3.0}
            for name, values in (
                ("accuracy", greedy),
                ("pass@1", [sum(each) / 4 for each in samples]),
                ("pass@4", [max(each) for each in samples]),
            ):
                mean = sum(values) / held_out
                line |= {f"eval/{name}": mean}
                line |= {f"eval/{name}/low": max(0, mean - 0.05)}
                line |= {f"eval/{name}/high": min(1, mean + 0.05)}
            line |= {"eval/mean_length": 31.0, "eval/clipped_ratio": 0.0}
            lines.append(line)
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "evaluations.jsonl", evaluations)


def _write_completions(
    folder: Path, *, steps: int, prompts: int, group_size: int, text: str | None, rng: random.Random
) -> None:
    rows, passes = [], []
    for step in range(1, steps + 1):
        seen = [(step * 6 + number) % prompts for number in range(6)]
        skill = [min(1, step / steps + 0.1 * rng.random()) for _ in seen]
        rates = [round(group_size * each) / group_size for each in skill]
        rewards = [rate + 0.1 for rate in rates]
        passes.append({"step": step, "prompt_index": seen, "pass_rate": rates, "reward": rewards})
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
    write_lines(folder / "completions.jsonl", rows)
    write_lines(folder / "prompts.jsonl", passes)
