"""What a run has come to, in plain sentences: did it help, is that sure, what was wrong with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from torchtune_grpo.plain import visible
from torchtune_grpo.report._run import Record, Run, as_text, number
from torchtune_grpo.statistics import Paired, bootstrap_interval, paired_test

_SURE = 0.05  # of p: the usual level
_FEW = 50  # held-out problems; 95 % intervals are then wider than +-14 points at 50 %


@dataclass(frozen=True)
class Score:
    """One metric of one evaluation, with its 95 % interval where that is known."""

    step: int
    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return percent(self.mean)

    @property
    def interval(self) -> str:
        """As text."""
        if self.low is None or self.high is None:
            return ""
        return f"{percent(self.low)} to {percent(self.high)}"


def percent(share: float) -> str:
    """0.0781 -> 7.8 %"""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def scores(run: Run, name: str) -> list[Score]:
    """A metric at each evaluation, such as ``accuracy``."""
    found, greedy = [], {each["step"]: each.get("greedy") for each in run.scores}
    for record in run.evaluations:
        mean = number(record.get(f"eval/{name}"))
        low, high = (number(record.get(f"eval/{name}/{end}")) for end in ("low", "high"))
        if low is None and name == "accuracy" and greedy.get(record["step"]):
            low, high = bootstrap_interval(greedy[record["step"]])
        if mean is not None:
            found.append(Score(record["step"], mean, low, high))
    return found


def names_of_scores(run: Run) -> list[str]:
    """The evaluations' metrics that are shares of right answers, accuracy first."""
    known = {key.removeprefix("eval/") for record in run.evaluations for key in record}
    return sorted(name for name in known if re.fullmatch(r"accuracy|(pass|maj)@\d+", name))


def compared(before: Record, after: Record, name: str = "accuracy") -> Paired | None:
    """The paired test between two lines of evaluations.jsonl, if they are of the same prompts."""
    if before.get("prompt_index") != after.get("prompt_index"):
        return None
    pair = [_by_prompt(record, name) for record in (before, after)]
    return paired_test(*pair) if pair[0] and pair[1] else None


def _by_prompt(record: Record, name: str) -> list[float]:
    if name == "accuracy":
        return record.get("greedy") or []
    samples = record.get("samples") or [] if name == "pass@1" else []
    return [sum(each) / len(each) for each in samples]


def verdict(run: Run) -> dict[str, Any]:
    """The headline, whether to believe it and why, a table, and what the run has taken."""
    tone, headline, why = _judge(run)
    return {
        "tone": tone,
        "headline": headline,
        "why": why,
        "scores": [_row(run, name) for name in names_of_scores(run)],
        "facts": _facts(run),
        "findings": findings(run),
    }


def _judge(run: Run) -> tuple[str, str, list[str]]:
    accuracy = scores(run, "accuracy")
    if not accuracy:
        return "unsure", *_without_evaluation(run)
    first, last = accuracy[0], accuracy[-1]
    if len(accuracy) == 1:
        when = "before training" if first.step == 0 else f"after step {first.step}"
        why = "A second evaluation, now or at the end, will tell whether training helps."
        return "unsure", f"Held-out accuracy was {first} {when}.", [why]
    moved = last.mean - first.mean
    verb = "rose" if moved > 0 else "fell" if moved < 0 else "stayed"
    change = f"from {first} to {last}" if moved else f"at {first}"
    headline = f"Held-out accuracy {verb} {change}."
    test = compared(run.scores[0], run.scores[-1]) if run.scores else None
    if test is None:
        return "unsure", headline, ["No test was possible: evaluations.jsonl lacks the two ends."]
    why = _reasons(run, test)
    if test.p >= _SURE:
        return "unsure", headline, why
    return ("good" if moved > 0 else "bad"), headline, why


def _reasons(run: Run, test: Paired) -> list[str]:
    before, after = (_by_prompt(run.scores[end], "accuracy") for end in (0, -1))
    better = sum(new > old for old, new in zip(before, after, strict=True))
    worse = sum(new < old for old, new in zip(before, after, strict=True))
    counts = (
        f"Of {len(before)} problems that it never trained on, it does better on {better} "
        f"and worse on {worse} than before."
    )
    points = f"{points_of(test.low)} to {points_of(test.high)} points"
    if test.p < _SURE:
        reasons = [
            f"Believe it: {counts}",
            f"Chance alone does this {chance(test.p)}; the change is {points} (95 % interval).",
        ]
        if test.difference < 0:
            reasons.append("Training made the model worse: take an earlier checkpoint.")
    else:
        width = 50 * (test.high - test.low)
        reasons = [
            f"Do not believe a change yet: {counts}",
            f"Chance alone does as much {chance(test.p)}; the change may be {points} (95 % "
            f"interval). {len(before)} problems show a change of {width:.0f} points or more: train "
            "longer, or evaluate on more (eval_dataset).",
        ]
    if len(before) < _FEW:
        reasons.append(f"{len(before)} problems are few; evaluate on 100 or more (eval_dataset).")
    return reasons


def points_of(share: float) -> str:
    """0.884 -> +88.4"""
    return f"{100 * share:+.1f}"


def chance(p: float) -> str:
    """How often, in words."""
    return "less than once in 1,000 times (p < 0.001)" if p < 0.001 else f"in {percent(p)} of cases"


def _without_evaluation(run: Run) -> tuple[str, list[str]]:
    rewards = [r for r in (number(each.get("reward")) for each in run.steps) if r is not None]
    if not rewards:
        return "No step is done yet.", ["Reload this page when the run has written it anew."]
    tenth = max(1, len(rewards) // 10)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    return f"The training reward went from {first:.2f} to {last:.2f}.", [
        "Do not believe in progress yet: no held-out evaluation was recorded, and a reward can "
        "rise without better answers. Set eval_dataset."
    ]


def _row(run: Run, name: str) -> dict[str, Any]:
    found = scores(run, name)
    first, last = found[0], found[-1]
    single = len(found) == 1
    test = compared(run.scores[0], run.scores[-1], name) if run.scores and not single else None
    kind, _, k = name.partition("@")
    label = {
        "accuracy": "Accuracy: greedy answers",
        "pass": f"{name}: one of {k} samples is right" if k != "1" else "pass@1: sampled answers",
        "maj": f"{name}: the majority of {k} samples",
    }[kind]
    ends = [first] if single else [first, last]
    return {
        "label": label,
        "ends": [[e.mean, e.low, e.high, str(e), e.interval, f"step {e.step}"] for e in ends],
        "change": "" if single else f"{points_of(last.mean - first.mean)} points",
        "interval": f"{points_of(test.low)} to {points_of(test.high)}" if test else "",
        "p": "" if test is None else "p < 0.001" if test.p < 0.001 else f"p = {test.p:.3f}",
    }


def findings(run: Run) -> list[dict[str, Any]]:
    """Those that are open first, each with the step at which it ended."""
    found: dict[str, dict[str, Any]] = {}
    for number_, line in enumerate(run.findings):
        name = str(line.get("name"))
        if line.get("event") == "ends":
            for each in found.values():
                if each["name"] == name.replace("_", " ") and each["until"] is None:
                    each["until"] = line["step"]
            continue
        texts = {key: as_text(line.get(key) or "") for key in ("evidence", "key", "remedy")}
        since = number(line.get("since")) or line["step"]
        shown = visible(name).replace("_", " ")
        found[f"{name} {number_}"] = {"name": shown, "since": since, "until": None, **texts}
    return sorted(found.values(), key=lambda each: (each["until"] is not None, each["since"]))


def _facts(run: Run) -> list[tuple[str, str]]:
    total = number(run.config.get("num_steps"))
    training, evaluating = (
        sum(number(each.get(key)) or 0 for each in lines)
        for key, lines in (("step_time", run.steps), ("time/eval", run.evaluations))
    )
    facts = [
        ("Steps", f"{run.steps_done} of {total}" if total else str(run.steps_done)),
        ("State", _state(run, total)),
        ("Time", duration(training + evaluating)),
        ("of it evaluating", duration(evaluating)),
    ]
    tokens = number(run.steps[-1].get("num_tokens")) if run.steps else None
    if tokens is not None:
        facts.append(("Tokens", f"{tokens:,.0f}"))
    best = max(scores(run, "accuracy"), key=lambda score: score.mean, default=None)
    if best is not None:
        facts.append(("Best accuracy", f"{best} after step {best.step}"))
    return facts


def _state(run: Run, total: float | None) -> str:
    if total and run.steps_done >= total:
        return "finished"
    file = run.folder / "metrics.jsonl"
    if not file.is_file():
        return "just started"
    written = datetime.fromtimestamp(file.stat().st_mtime, UTC)
    return f"running or ended early; last record {written:%Y-%m-%d %H:%M} UTC"


def duration(seconds: float) -> str:
    """75 -> 1 min 15 s"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
