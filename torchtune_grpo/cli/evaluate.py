"""Compare the weights before and after training on held-out prompts.

    torchtune-grpo evaluate OUTPUT_DIR --samples 8 --by level
    torchrun --nproc_per_node 2 -m torchtune_grpo evaluate my_config.yaml --base

The same prompts are answered with the weights that training starts from and with those of a
checkpoint, greedily and ``--samples`` times, as the run's own evaluations do; see
docs/evaluation.md. ``key=value`` and ``~key`` change the config, as for ``tune``. Where it has no
held-out prompts, keys of ``eval_dataset`` change its ``dataset``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_grpo.checkpoint.folder import (
    all_checkpoints,
    checkpoint_folder,
    sha256_of,
    step_of,
)
from torchtune_grpo.cli.commands import add_run, parse, run_config
from torchtune_grpo.config.text import check_writable, to_json, visible, write_text
from torchtune_grpo.evaluation.answers import KeptAnswers
from torchtune_grpo.evaluation.evaluator import Evaluation, compare_policies, comparison_tables
from torchtune_grpo.machine import parallel
from torchtune_grpo.rewards import TrainerState
from torchtune_grpo.run import Run


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Answers held-out prompts before and after training, and compares."
    )
    add_run(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", help="such as step_000020 (default: the newest)")
    which.add_argument("--base", action="store_true", help="only the weights before training")
    parser.add_argument("--samples", type=int, help="for each prompt (default: evaluation.samples)")
    parser.add_argument("--by", metavar="COLUMN", help="also for each value of this column")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N answers")
    parser.add_argument("--output", type=Path, help="JSON file to write, with every answer")
    args = parse(parser)
    run = _run(args)
    if args.output is not None:  # fails now, not after an hour of answers
        check_writable("--output", args.output)
    where = {"base": args.base, "checkpoint": args.checkpoint, "by": args.by}
    report = evaluate(run, **where, output=args.output)
    run.close()
    if parallel.rank() == 0:
        if args.output is not None:
            write_text(args.output, json.dumps(to_json(report), indent=1))
            for who in report["weights"]:
                _kept(args.output, who).unlink()
        count, temperature = report["samples"], report["temperature"]
        sampled = f", {count} samples each at temperature {temperature:g}" if count else ""
        print(f"Greedy answers{sampled}. [95 % interval over prompts]")
        print(*comparison_tables(report["groups"]), *shown(report, args.show), sep="\n")
        if args.output is not None:
            print(f"Written to {args.output}")
    parallel.end_process_group()


def _run(args: argparse.Namespace) -> Run:
    cfg = run_config(args)
    changes = cfg.get("eval_dataset")
    if isinstance(changes, DictConfig) and changes and "_component_" not in changes:
        cfg.eval_dataset = OmegaConf.merge(cfg.dataset, changes)
    OmegaConf.update(cfg, "evaluation", {"keep_best": None, "stop_at": None})  # for training
    if args.samples is not None:
        OmegaConf.update(cfg, "evaluation.samples", args.samples)
    run = Run(cfg)
    if run.cfg.eval_dataset is None:
        raise ValueError("eval_dataset: there is none; give eval_dataset.split=test, for instance.")
    return run


def evaluate(
    run: Run,
    *,
    base: bool = False,
    checkpoint: str | None = None,
    by: str | None = None,
    output: Path | None = None,
) -> dict[str, Any]:
    """Evaluate a run's policy before and after training; every rank has to call it.

    ``base``: only before training. ``checkpoint``: a folder in ``output_dir``; None = the newest.
    Prompts are grouped by their values in the column ``by``. Until the end, answers are kept beside
    the file ``output``. docs/evaluation.md describes the report that is returned.
    """
    run.prepare_model()
    cfg, weights = run.cfg, _weights(run, base=base, checkpoint=checkpoint)
    dataset, evaluator = run.eval_dataset, run.evaluator
    assert dataset is not None and evaluator is not None
    columns = dataset[0]["columns"]
    if by is not None and by not in columns:
        raise ValueError(f"--by={by}: eval_dataset has no such column, but {sorted(columns)}.")
    found: dict[str, Evaluation] = {}
    for who, folder in weights.items():
        step = step_of(folder) if folder else 0
        state = TrainerState(global_step=step, max_steps=cfg.num_steps)
        kept = None
        if output is not None:
            code = [sha256_of(Path(r.file)) for r in run.rewards.rewards if r.file]
            about = [run.checkpoints.identity(folder), dataset.digest, code]
            kept = KeptAnswers(_kept(output, who), about)
        found[who] = evaluator(run.load_engine(folder), state=state, kept=kept)
    answered = {who: each.answered for who, each in found.items()}
    return {
        "weights": {who: str(at or cfg.checkpointer.checkpoint_dir) for who, at in weights.items()},
        "dataset": OmegaConf.to_container(cfg.eval_dataset),
        "samples": cfg.evaluation.samples,
        "temperature": cfg.eval_sampling_params.temperature,
        "groups": compare_policies(found, by=by),
        "answers": {who: [asdict(each) for each in prompts] for who, prompts in answered.items()},
    }


def _kept(output: Path, who: str) -> Path:
    """Return the file that keeps a policy's answers until the report is written."""
    return output.with_name(f".{output.name}.{who}")


def _weights(run: Run, *, base: bool, checkpoint: str | None) -> dict[str, Path | None]:
    """Return the policies to compare; None stands for the weights that training starts from."""
    before: dict[str, Path | None] = {"before": None}
    if base:
        return before
    if checkpoint is None:
        newest = parallel.on_first_rank(run.newest_checkpoint)
        return before if newest is None else before | {"after": newest}
    if match := re.fullmatch(r"(?:step_)?(\d+)", checkpoint):
        checkpoint = checkpoint_folder(Path(), int(match[1])).name
    folder = Path(run.cfg.output_dir, checkpoint)
    name = folder.resolve().name  # `best` is a link
    present = [path.name for path in all_checkpoints(folder.parent)]
    if name not in present:
        there = ", ".join(present) or "none"
        raise ValueError(
            f"--checkpoint={checkpoint}: is not in {folder.parent}, which has {there}."
        )
    return before | {"after": folder.with_name(name)}


def shown(report: Mapping[str, Any], number: int) -> list[str]:
    """Return lines with the first prompts, and each one's greedy answers and their verdicts."""
    lines = []
    (grader, found), *_ = report["groups"]["all"]["graders"].items()
    names = {0.0: "wrong", 1.0: "right"} if found["before"]["measure"] == "accuracy" else {}
    for row, each in enumerate(report["answers"]["before"][:number]):
        lines += ["", f"=== {visible(each['prompt'])}"]
        for who, answered in report["answers"].items():
            answer = answered[row]["greedy"]
            score = answer["scores"][grader]
            verdict = "not scored" if score is None else names.get(score, f"reward {score:.3f}")
            lines += [f"--- {who}: {verdict}", visible(answer["completion"])]
    return lines
