"""Compare prompts on the same training questions, and say which one a run should start from.

    torchtune-grpo prompts my_config.yaml --candidates mine.yaml --output best.yaml

A candidate is a piece of a config: changes to ``dataset``, ``sampling`` and ``temperature``. The
policy before training answers all of them, on questions drawn from ``dataset``; ``eval_dataset``
never chooses. The rule is ``Tally.beats``; docs/plan.md#which-prompt.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from torchtune_grpo.cli.commands import add_run, config_name, count, parse, run_config
from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import config_files
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.text import ConfigError, aligned, check_writable, problems_in, write_text
from torchtune_grpo.evaluation.evaluator import Evaluation
from torchtune_grpo.evaluation.statistics import paired_test
from torchtune_grpo.evaluation.thresholds import SURE
from torchtune_grpo.machine import parallel
from torchtune_grpo.rewards import TrainerState
from torchtune_grpo.rollout.engine import check_engine
from torchtune_grpo.rollout.request import RolloutEngine
from torchtune_grpo.run import Run

SHIPPED = Path(__file__).with_name("prompts.yaml")  # for questions whose answer is a number
KEYS = ("dataset", "sampling", "temperature")  # that a candidate may change
ROUND = 16  # questions, after which those that cannot win any more are left out


class Tally(NamedTuple):
    """What a candidate's samples say, by the row of their question in the data."""

    best: dict[object, float]  # the highest score of the group: pass@k
    signal: dict[object, float]  # how far two samples are apart, for 1,000 tokens of the group

    def beats(self, other: Tally, *, level: float) -> bool:
        """Whether a run should rather start here, at this level of p on the same questions.

        Training makes likely what a group's best sample does. So the best ones score higher; or
        they score no lower, and differ more from the others for the tokens that they cost.
        """
        rows = [row for row in self.best if row in other.best]
        best, signal = (
            paired_test([theirs[row] for row in rows], [mine[row] for row in rows])
            for mine, theirs in zip(self, other, strict=True)
        )
        is_surely_ahead = any(test.difference > 0 and test.p < level for test in (best, signal))
        return best.difference >= 0 and is_surely_ahead


class Candidate:
    """A piece of a config, and the answers to its prompts so far, in ``found``."""

    def __init__(self, name: str, changes: Mapping[str, Any], run: Run) -> None:
        merged: Any = OmegaConf.merge(run.given, changes)
        self.name, self.changes, self.cfg = name, changes, read_config(merged, GRPOConfig)
        if fixed := [key for key in changes if key not in KEYS]:
            raise ValueError(f"{fixed[0]}: a candidate changes only {', '.join(KEYS)}.")
        check_engine(self.cfg)
        self.data = run.load_dataset("dataset", self.cfg)
        # Candidates that are alike in this have the same answers.
        self.asks = [self.data[0]["tokens"], self.data.prefill, self.cfg.sampling_params]
        self._evaluator = run.make_evaluator(self.data, self.cfg)
        self.found = Evaluation([], (), "", seconds=0.0)

    def answer(self, engine: RolloutEngine, rows: Sequence[Any]) -> None:
        """Answer further questions, given by their rows in the data."""
        state = TrainerState(global_step=0, max_steps=self.cfg.num_steps)
        positions = [self.data.row_numbers.index(row) for row in rows]
        now, before = self._evaluator(engine, state=state, positions=positions), self.found
        answered, seconds = before.answered + now.answered, before.seconds + now.seconds
        self.found = replace(now, answered=answered, seconds=seconds)

    @property
    def tally(self) -> Tally:
        answered, data, k = self.found.answered, self.data, self.cfg.grpo_samples
        prompts: Any = self.found.record["prompts"]  # None where no reward applies
        one, two, best = ([score or 0.0 for score in prompts[f"pass@{n}"]] for n in (1, 2, k))
        # The better of two is above their mean by half of how far they are apart.
        apart = [2 * (high - mean) for high, mean in zip(two, one, strict=True)]
        samples = [sum(answer.tokens for answer in each.samples) for each in answered]
        costs = [(len(data[e.index]["tokens"]) + n) / 1000 for e, n in zip(answered, samples)]
        ratio, cost = sum(apart) / sum(costs), fmean(costs)
        # What each question adds to the ratio, whose uncertainty is that of its costs, too.
        signal = [ratio + (a - ratio * c) / cost for a, c in zip(apart, costs, strict=True)]
        rows = [data.row_numbers[each.index] for each in answered]
        return Tally(dict(zip(rows, best)), dict(zip(rows, signal)))

    @property
    def cells(self) -> dict[str, str]:
        """What the table says of it, by column."""
        found, (best, signal) = self.found, self.tally
        samples = [answer for each in found.answered for answer in each.samples]
        scores = [{a.scores[found.graders[0]] for a in each.samples} for each in found.answered]
        numbers: dict[str, Any] = {
            **{name: found.by(name).record.get("eval/accuracy") for name in found.graders},
            "sampled": found.record.get("eval/pass@1"),
            f"pass@{self.cfg.grpo_samples}": fmean(best.values()),
            "teaching": fmean(len(each) > 1 for each in scores),
            "cut off": fmean(answer.truncated for answer in samples),
            "signal/1k": fmean(signal.values()),
            "tokens": round(fmean(answer.tokens for answer in samples)),
            "seconds": round(self.found.seconds),
        }
        shown = {n: f"{v:.3f}" if isinstance(v, float) else str(v) for n, v in numbers.items()}
        return {"": self.name, "questions": str(len(best)), **shown}


def candidates(run: Run, file: Path) -> list[Candidate]:
    """Make the candidates that a file describes, behind the config as it is."""
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--candidates={file}: cannot be read: {error}") from error
    if not isinstance(given, dict) or not all(isinstance(each, dict) for each in given.values()):
        raise ValueError(f"--candidates={file}: give the changes of each candidate by its name.")
    made: list[Candidate] = []
    for name, changes in {"config": {}, **given}.items():
        try:
            made.append(Candidate(str(name), changes, run))
        except ValueError as error:
            raise ConfigError(*(f"{name}: {problem}" for problem in problems_in(error))) from error
        if same := [each.name for each in made[:-1] if each.asks == made[-1].asks]:
            _say(f"{made.pop().name}: the same as {same[0]}.")
    return made


def compare(engine: RolloutEngine, tried: list[Candidate], rows: list[Any]) -> list[Candidate]:
    """Answer the questions in rounds; return those that no other one beats, most signal first.

    One that is beaten after a round takes no part in those to come. As each round is a chance to be
    unlucky, the level is divided by their number, but for the last one.
    """
    left, rounds = [*tried], math.ceil(len(rows) / ROUND)
    for done in range(rounds):
        for each in left:
            each.answer(engine, rows[done * ROUND : (done + 1) * ROUND])
            _say(", ".join(" ".join(cell) for cell in each.cells.items()).strip())
        level = SURE if done + 1 == rounds else SURE / rounds
        tallies = {each: each.tally for each in left}
        is_beaten = {
            each: any(other.beats(own, level=level) for other in tallies.values())
            for each, own in tallies.items()
        }
        beaten = [each for each in left if is_beaten[each]]
        left = [each for each in left if not is_beaten[each]]
        if beaten:
            _say(f"Left out, as another one is clearly better: {', '.join(e.name for e in beaten)}")
        if len(left) == 1:
            break
    return sorted(left, key=lambda each: -fmean(each.tally.signal.values()))


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and a newline alone as one."""

    def represent_scalar(self, tag: str, value: Any, style: str | None = None) -> yaml.ScalarNode:
        if "\n" in str(value):
            style = "|" if value.strip() else '"'
        return super().represent_scalar(tag, value, style)


def as_yaml(changes: Mapping[str, Any], *, has_held_out: bool) -> str:
    """Write a candidate as keys of a config, with held-out prompts as those of training."""
    keys = dict(changes)
    if has_held_out and "dataset" in keys:
        keys["eval_dataset"] = {key: f"${{dataset.{key}}}" for key in keys["dataset"]}
    return yaml.dump(keys, Dumper=_Dumper, sort_keys=False, width=1000) if keys else ""


def _say(line: str) -> None:
    if parallel.rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compares prompts on training questions, and says which to start from."
    )
    add_run(parser)
    parser.add_argument("--candidates", type=Path, default=SHIPPED, help=f"default: {SHIPPED}")
    parser.add_argument("--questions", type=count, default=64, help="how many (default: 64)")
    parser.add_argument("--output", type=Path, help="config to write: this one with the winner")
    args = parse(parser)
    if args.output is not None:  # fails now, not after an hour of answers
        check_writable("--output", args.output)
    given = run_config(args)
    whole = given.copy()
    has_held_out = given.get("eval_dataset") is not None
    given.update(eval_dataset=None, evaluation={"samples": "${grpo_samples}"})
    run = Run(given)
    run.prepare_model()
    tried = candidates(run, args.candidates)
    usable = sorted(set.intersection(*({*each.data.row_numbers} for each in tried)))
    if args.questions > len(usable):
        there = f"{len(usable)} rows of dataset that all candidates can use"
        raise ValueError(f"--questions={args.questions}: there are {there}; give fewer.")
    rows = random.Random(run.cfg.seed).sample(usable, args.questions)
    best, *others = compare(run.load_engine(None), tried, rows)
    run.close()
    _say("\n".join(["", *aligned([[*best.cells], *([*e.cells.values()] for e in tried)]), ""]))
    if not any(best.tally.signal.values()):
        raise ValueError("No candidate's samples differ, so none teaches: set temperature higher.")
    why = f"Start from {best.name}: no other one is clearly ahead by pass@{run.cfg.grpo_samples}"
    if others:
        why += f", and it has more signal for its tokens than {', '.join(e.name for e in others)}"
    keys = as_yaml(best.changes, has_held_out=has_held_out)
    _say(f"{why}.\n\n{keys}".rstrip())
    if args.output is not None and parallel.rank() == 0:
        name = config_name(args.run)
        base = name if name in config_files() else str(Path(name).expanduser().resolve())
        text = as_yaml({"base_config": base}, has_held_out=False) + keys
        if args.overrides:
            text = OmegaConf.to_yaml(OmegaConf.merge(whole, OmegaConf.create(keys)))
        write_text(args.output, text)
    parallel.end_process_group()
