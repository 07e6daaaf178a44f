"""Score a run's saved completions with other rewards, without sampling.

    torchtune-grpo score OUTPUT_DIR 'rewards=[my_rewards.stricter]'

Columns come from the run's data set, in which each prompt has to be what it was. Token ids are
those of the texts, encoded anew. docs/rewards.md describes the table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import chain, combinations, groupby
from pathlib import Path
from statistics import fmean

from omegaconf import DictConfig, OmegaConf

from torchtune_grpo.cli.commands import add_run, named_config, parse, run_config
from torchtune_grpo.config.text import aligned, to_json, write_text
from torchtune_grpo.environments.environment import environment_rewards
from torchtune_grpo.monitor.record import COMPLETIONS_FILE, Record, read, read_lines
from torchtune_grpo.monitor.recorder import logged_column
from torchtune_grpo.rewards import TrainerState
from torchtune_grpo.run import Run
from torchtune_grpo.trajectory import Completion, message

Scores = Mapping[str, float | None]  # of a completion, by reward, and their total

_OF_REWARDS = ("rewards", "deciding_reward")  # keys that do not change the data


def main() -> None:
    parser = argparse.ArgumentParser(description="Scores a run's completions with other rewards.")
    add_run(parser)
    parser.add_argument("--output", type=Path, help="file to write, with a JSON line per answer")
    args = parse(parser)
    folder = Path(args.run)
    cfg, rows = run_config(args), read_lines(folder / COMPLETIONS_FILE)
    size = int(cfg.grpo_samples)
    rows = rows[: len(rows) // size * size]  # a kill may have torn the last group
    if not rows:
        raise ValueError(
            f"{folder}: has no {COMPLETIONS_FILE}; give a run with log_groups above 0."
        )
    sampled = size * sum(len(event["prompts"]["reward"]) for event in read(folder, "step"))
    old = [{"total": row["reward"], **row["rewards"]} for row in rows]
    new = _rescore(args, cfg, rows, size)
    share = f"{len(rows) / sampled:.0%} of the run's answers are saved, informative groups first"
    print(f"{len(rows) // size} groups of {size}: {share}.", *_table(old, new, size), sep="\n")
    if args.output is not None:
        pairs = zip(rows, new, strict=True)
        lines = (json.dumps(row | {"new": scores}) + "\n" for row, scores in pairs)
        write_text(args.output, "".join(lines))


def _rescore(
    args: argparse.Namespace, cfg: DictConfig, saved: Sequence[Record], size: int
) -> list[Scores]:
    """Return the new scores of all completions, from one call of the rewards for each step."""
    kept = [text for text in args.overrides if not text.lstrip("~").startswith(_OF_REWARDS)]
    # The run's own rewards decide which rows were left out, and so what number a prompt has.
    own = named_config(argparse.Namespace(run=args.run, overrides=kept))
    data = Run(OmegaConf.masked_copy(own, [*cfg, *_OF_REWARDS]))
    run, found = Run(cfg), list[Scores]()
    prefill, encode = data.dataset.prefill, data.tokenizer.encode
    for step, of_step in groupby(saved, key=lambda row: row["step"]):
        rows = [*of_step]
        columns = [_columns(data, row) for row in rows]
        texts = [row["completion"].removeprefix(prefill) for row in rows]
        ended = [row["ended"] == "stop_token" for row in rows]
        scores = run.rewards(
            prompts=[data.dataset[row["prompt_index"]]["prompt"] for row in rows],
            completions=[_completion(data, row) for row in rows],
            columns={name: [each[name] for each in columns] for name in columns[0]},
            group_size=size,
            completion_ids=[encode(t, add_bos=False, add_eos=e) for t, e in zip(texts, ended)],
            trainer_state=TrainerState(step - 1, max_steps=run.cfg.num_steps),
        )
        for total, each in zip(scores.total.tolist(), scores.scores.tolist(), strict=True):
            named = dict(zip(scores.names, each, strict=True))
            found.append(to_json({"total": total, **named}))
    run.close()
    data.close()
    return found


def _columns(data: Run, row: Record) -> Mapping[str, object]:
    """Return a row's columns, which the record may have cut, if its prompt is what it was."""
    item = data.dataset[row["prompt_index"]]
    now = {name: logged_column(value) for name, value in item["columns"].items()}
    changed = any(now.get(name, then) != then for name, then in row["columns"].items())
    if changed or str(item["prompt"]) != row["prompt"]:
        raise ValueError(
            f"dataset: prompt {row['prompt_index']} or its columns are not what they were; give "
            "the data that the run had."
        )
    return item["columns"]


def _completion(data: Run, row: Record) -> Completion:
    """Return a completion; an environment's own reward stays what it was."""
    text = row["completion"]
    messages = row.get("messages", [message("assistant", text)])
    kinds = {reward.name for reward in environment_rewards(data.environment_kinds)}
    given = [each for each in row["rewards"].items() if each[0] in kinds and each[1] is not None]
    kind, reward = given[0] if given else ("", None)
    return Completion(text, messages, row["ended"], kind=kind, reward=reward)


def _table(old: Sequence[Scores], new: Sequence[Scores], size: int) -> list[str]:
    """Return a line for the total and for each reward: old beside new."""
    rows = [["", "old mean", "new mean", "same order", "changed"]]
    for name in dict.fromkeys(chain(*old, *new)):
        pairs = [(one.get(name), other.get(name)) for one, other in zip(old, new, strict=True)]
        groups = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        alike = [
            (a > b) - (a < b) == (c > d) - (c < d)
            for (a, c), (b, d) in chain(*(combinations(group, 2) for group in groups))
            if a is not None and b is not None and c is not None and d is not None
        ]
        changed = str(sum(a != b for a, b in pairs)) if alike else "-"
        rows.append([name, *map(_mean, zip(*pairs)), _mean(alike), changed])
        if name == "total":
            signal = [[len({*kind}) > 1 for kind in zip(*group)] for group in groups]
            rows.append(["groups with signal", *map(_mean, zip(*signal)), "", ""])
    return aligned(rows)


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.3f}" if known else "-"
