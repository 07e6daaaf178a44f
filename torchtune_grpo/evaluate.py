"""What training has changed, on held-out prompts, with intervals and a paired test.

    python -m torchtune_grpo.evaluate OUTPUT_DIR --samples 8 --by level
    torchrun --nproc_per_node 2 -m torchtune_grpo.evaluate --config my_config.yaml --base

The same prompts are answered with the weights that training starts from and with those of a
checkpoint, greedily and ``--samples`` times, as the run's own evaluations do; see
docs/evaluation.md. ``key=value`` and ``~key`` change the config, as for ``tune``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from torchtune_grpo import parallel
from torchtune_grpo.command_line import apply_override
from torchtune_grpo.config import GRPOConfig
from torchtune_grpo.errors import told_in_one_line
from torchtune_grpo.evaluation import Answered, Evaluation, Evaluator, metrics_of, scores_of
from torchtune_grpo.load_data import load_data
from torchtune_grpo.plain import plain, visible
from torchtune_grpo.read_config import read_config
from torchtune_grpo.rewards import (
    Reward,
    RewardSet,
    TrainerState,
    last_number_reward,
    math_correctness_reward,
)
from torchtune_grpo.sample import (
    CONFIG_HELP,
    is_override,
    load_policy,
    load_run_config,
    newest_checkpoint,
    open_run,
)
from torchtune_grpo.statistics import paired_test

LENIENT = "last_number"  # the grader beside math_correctness_reward
_MEANS = ("eval/mean_length", "eval/clipped_ratio")  # the same for all graders
_WIDTH = 36


def main() -> None:
    """Entry point of ``python -m torchtune_grpo.evaluate``."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtune_grpo.evaluate",
        description="Answers held-out prompts before and after training, and compares.",
    )
    parser.add_argument("run", nargs="*", metavar="run's folder, or key=value", help="as --config")
    parser.add_argument("--config", help=CONFIG_HELP)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", help="such as step_000020 (default: the newest)")
    which.add_argument("--base", action="store_true", help="only the weights before training")
    parser.add_argument("--samples", type=int, help="for each prompt (default: eval_samples)")
    parser.add_argument(
        "--dataset",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="changes eval_dataset, or is it, as a component; may be repeated",
    )
    parser.add_argument("--by", metavar="COLUMN", help="also for each value of this column")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N answers")
    parser.add_argument("--output", type=Path, help="JSON file to write, with every answer")
    args = parser.parse_intermixed_args()
    overrides = [text for text in args.run if is_override(text)]
    runs = [text for text in (args.config, *args.run) if text and text not in overrides]
    if len(runs) != 1:
        parser.error("give one config or one run's folder")
    with told_in_one_line():
        cfg = _config(runs[0], overrides, args)
        report = evaluate(cfg, base=args.base, checkpoint=args.checkpoint, by=args.by)
        if parallel.rank() == 0:
            print("\n".join([*table(report), *shown(report, args.show)]))
            if args.output is not None:
                args.output.write_text(json.dumps(plain(report), indent=1), encoding="utf-8")
        parallel.end_process_group()


def _config(name: str, overrides: list[str], args: argparse.Namespace) -> GRPOConfig:
    cfg = load_run_config(name, overrides)
    if args.dataset and cfg.get("eval_dataset") is None:
        cfg.eval_dataset = cfg.dataset.copy()
    for text in args.dataset:
        is_node = text.startswith("{") or "=" not in text
        if is_node:
            cfg.eval_dataset = None
        apply_override(cfg, f"eval_dataset{'=' if is_node else '.'}{text}")
    cfg.keep_best = cfg.stop_at = cfg.patience = None  # of training
    if args.samples is not None:
        cfg.eval_samples = args.samples
    settings: GRPOConfig = read_config(cfg)
    if settings.eval_dataset is None:
        raise ValueError("eval_dataset: there is none; give --dataset split=test, for instance.")
    return settings


def evaluate(
    cfg: GRPOConfig, *, base: bool = False, checkpoint: str | None = None, by: str | None = None
) -> dict[str, Any]:
    """Evaluates a run's policy before and after training; every rank has to call it.

    Args:
        cfg (GRPOConfig): its ``eval_dataset`` holds the prompts.
        base (bool): only before training.
        checkpoint (str | None): name of a folder in ``output_dir``; None = the newest, if any.
        by (str | None): a column; its values part the prompts.

    Returns:
        dict[str, Any]: what ``--output`` writes; docs/evaluation.md says what is in it.

    Raises:
        ValueError: if there is no such checkpoint or column.
    """
    device, tokenizer = open_run(cfg)
    weights = _weights(cfg, base=base, checkpoint=checkpoint)
    found: dict[str, Evaluation] = {}
    with contextlib.closing(_rewards(cfg)) as rewards:
        data = load_data(cfg, tokenizer=tokenizer, rewards=rewards, keys=["eval_dataset"])
        dataset = data["eval_dataset"]
        columns = dataset[0]["columns"]
        if by is not None and by not in columns:
            raise ValueError(f"--by={by}: eval_dataset has no such column, but {sorted(columns)}.")
        evaluator = Evaluator(cfg, dataset, tokenizer=tokenizer, rewards=rewards)
        for who, folder in weights.items():
            step = int(folder.name.removeprefix("step_")) if folder else 0
            state = TrainerState(global_step=step, max_steps=cfg.num_steps)
            found[who] = evaluator(load_policy(cfg, device=device, checkpoint=folder), state=state)
    prompts = found["before"].answered
    groups = {"all": [*range(len(prompts))]}
    if by is not None:
        for row, each in enumerate(prompts):
            groups.setdefault(f"{by}={each.columns[by]}", []).append(row)
    return {
        "weights": {who: str(at or cfg.checkpointer.checkpoint_dir) for who, at in weights.items()},
        "dataset": OmegaConf.to_container(cfg.eval_dataset),
        "samples": cfg.eval_samples,
        "temperature": cfg.temperature,
        "groups": {name: _group(found, rows, rewards) for name, rows in groups.items()},
        "answers": [
            {"prompt_index": each.index, "prompt": each.prompt, "columns": each.columns}
            | {who: _answers(evaluation.answered[row]) for who, evaluation in found.items()}
            for row, each in enumerate(prompts)
        ],
    }


def _weights(cfg: GRPOConfig, *, base: bool, checkpoint: str | None) -> dict[str, Path | None]:
    """The policies to compare; None stands for the weights that training starts from."""
    before: dict[str, Path | None] = {"before": None}
    if base:
        return before
    if checkpoint is None:
        newest = parallel.on_first_rank(newest_checkpoint, cfg)
        return before if newest is None else before | {"after": newest}
    if match := re.fullmatch(r"(?:step_)?(\d+)", checkpoint):
        checkpoint = f"step_{int(match[1]):06d}"
    folder = Path(cfg.output_dir, checkpoint)
    if not folder.is_dir():
        there = ", ".join(sorted(path.name for path in folder.parent.glob("step_*"))) or "none"
        raise ValueError(
            f"--checkpoint={checkpoint}: is not in {folder.parent}, which has {there}."
        )
    return before | {"after": folder.with_name(folder.resolve().name)}  # `best` is a link


def _rewards(cfg: GRPOConfig) -> RewardSet:
    """The config's; where the one that decides reads answer tags, also the lenient grader."""
    rewards = RewardSet.from_config(cfg.rewards, max_failure_share=cfg.max_reward_failure_share)
    for reward in rewards.rewards:
        decides = reward.name == (cfg.eval_reward or rewards.names[0])
        if decides and (reward.declaration or reward.function) is math_correctness_reward:
            rewards.rewards.append(Reward(LENIENT, last_number_reward, weight=0.0))
    return rewards


def _group(
    found: Mapping[str, Evaluation], rows: Sequence[int], rewards: RewardSet
) -> dict[str, Any]:
    """Some prompts' metrics before and after, and what has changed, for each grader."""
    picked = {who: [each.answered[row] for row in rows] for who, each in found.items()}
    graders = {}
    for grader in [found["before"].reward, *(name for name in rewards.names if name == LENIENT)]:
        told: dict[str, Any] = {who: metrics_of(each, grader) for who, each in picked.items()}
        if "after" in picked:
            before, after = (scores_of(each, grader) for each in picked.values())
            told["change"] = {n: paired_test(before[n], after[n])._asdict() for n in before}
        graders[grader] = told
    return {"prompts": len(rows), "graders": graders}


def _answers(answered: Answered) -> dict[str, Any]:
    return {"greedy": asdict(answered.greedy), "samples": [asdict(a) for a in answered.samples]}


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines for a terminal: what :func:`evaluate` has found, the graders side by side."""
    sampled = f", {report['samples']} samples each at temperature {report['temperature']:g}"
    lines = [f"Greedy answers{sampled if report['samples'] else ''}. [95 % interval over prompts]"]
    for name, group in report["groups"].items():
        graders = group["graders"]
        title = f"{name}: {group['prompts']} prompts"
        names = "".join(grader.ljust(_WIDTH) for grader in graders)
        lines += ["", f" {title:26}{names}".strip()]
        first = next(iter(graders.values()))
        for metric in (m for m in first["before"] if not m.endswith(("/low", "/high"))):
            shown = [*graders.values()] if metric not in _MEANS else [first]
            for who in ("before", "after", "change"):
                cells = [_cell(grader.get(who, {}), metric) for grader in shown]
                if any(cells):
                    start = metric.removeprefix("eval/") if who == "before" else ""
                    row = f"  {start:15}{who:9}" + "".join(cell.ljust(_WIDTH) for cell in cells)
                    lines.append(row.rstrip())
    return lines


def _cell(values: Mapping[str, Any], metric: str) -> str:
    value = values.get(metric)
    if value is None:
        return ""
    if isinstance(value, Mapping):
        p = f"p={value['p']:.3f}" if value["p"] >= 0.001 else "p<0.001"
        return f"{value['difference']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}] {p}"
    if metric in _MEANS:
        return f"{value:.3f}"
    return f" {value:.3f} [{values[f'{metric}/low']:.3f}, {values[f'{metric}/high']:.3f}]"


def shown(report: Mapping[str, Any], number: int) -> list[str]:
    """Lines with the first prompts, and each one's greedy answers with their verdicts."""
    lines = []
    grader = next(iter(report["groups"]["all"]["graders"]))
    for each in report["answers"][:number]:
        lines += ["", f"=== {visible(each['prompt'])}"]
        for who in report["weights"]:
            answer = each[who]["greedy"]
            score = answer["scores"][grader]
            verdict = {0.0: "wrong", 1.0: "right"}.get(score, f"reward {score:.3f}")
            lines += [f"--- {who}: {verdict}", visible(answer["completion"])]
    return lines


if __name__ == "__main__":
    main()
