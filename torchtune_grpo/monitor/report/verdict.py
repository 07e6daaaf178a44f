"""What a run has come to, in plain sentences: did it help, is that sure, what was wrong with it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, NamedTuple

from torchtune_grpo.evaluation.statistics import Paired, paired_test
from torchtune_grpo.evaluation.stopping import should_stop
from torchtune_grpo.monitor.report.run import Record, Run, as_text, number

_SURE = 0.05  # of p: the usual level
_FEW = 50  # held-out problems: the 95 % interval of 50 % is then 28 points wide


class Score(NamedTuple):
    """One metric of one evaluation, with its 95 % interval where that is known."""

    step: int
    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = (
            f" ({percent(self.low)} to {percent(self.high)})"
            if self.low is not None and self.high is not None
            else ""
        )
        return percent(self.mean) + interval


def percent(share: float) -> str:
    """0.0781 -> 7.8 %"""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def changed_by(test: Paired) -> str:
    """The interval of a change, and how sure it is."""
    p = "p < 0.001" if test.p < 0.001 else f"p = {test.p:.3f}"
    return f"{100 * test.low:+.1f} to {100 * test.high:+.1f}, {p}"


def scores(run: Run, name: str) -> list[Score]:
    """A metric at each evaluation that has it, such as ``accuracy``."""
    found = []
    for record in run.evaluations:
        mean, low, high = (number(record.get(f"eval/{name}{end}")) for end in ("", "/low", "/high"))
        if mean is not None:
            found.append(Score(record["step"], mean, low, high))
    return found


def tested(before: Run, after: Run, name: str = "accuracy", *, first: int = 0) -> Paired | None:
    """The paired test between two evaluations of the same prompts, the second one the last.

    Args:
        before (Run): its evaluation number ``first``.
        after (Run): its last evaluation.
        name (str): ``accuracy`` or ``pass@1``; of others None comes back.
        first (int): 0, or -1 for the last one.
    """
    if not before.scores or not after.scores:
        return None
    ends = before.scores[first], after.scores[-1]
    old, new = (_by_prompt(record, name) for record in ends)
    same = ends[0] is not ends[1] and ends[0].get("prompt_index") == ends[1].get("prompt_index")
    return paired_test(old, new) if same and old and new else None


def _by_prompt(record: Record, name: str) -> list[float]:
    if name == "accuracy":
        return record.get("greedy") or []
    samples = record.get("samples") or [] if name == "pass@1" else []
    return [sum(each) / len(each) for each in samples]


def verdict(run: Run) -> dict[str, Any]:
    """The headline, whether to believe it and why, a table, and what the run has taken."""
    tone, headline, why = _judge(run)
    table = []
    for name in run.score_names:
        found, test = scores(run, name), tested(run, run, name)
        ends = [found[0], found[-1]] if len(found) > 1 else found
        change = f"{100 * (ends[-1].mean - ends[0].mean):+.1f} points" if len(ends) > 1 else ""
        table.append(
            {
                "label": _label(name),
                "ends": [{**end._asdict(), "text": str(end)} for end in ends],
                "change": change,
                "test": changed_by(test) if test else "",
            }
        )
    shown = {"tone": tone, "headline": headline, "why": why, "scores": table}
    return {**shown, "facts": _facts(run), "findings": findings(run)}


def _label(name: str) -> str:
    kind, _, k = name.partition("@")
    if kind == "accuracy":
        return "Accuracy: greedy answers"
    if kind == "maj":
        return f"{name}: the majority of {k} samples"
    return "pass@1: sampled answers" if k == "1" else f"{name}: one of {k} samples is right"


def _judge(run: Run) -> tuple[str, str, list[str]]:
    accuracy = scores(run, "accuracy")
    if not accuracy:
        return "unsure", *_without_evaluation(run)
    first, last = percent(accuracy[0].mean), percent(accuracy[-1].mean)
    if len(accuracy) == 1:
        when = f"after step {accuracy[0].step}" if accuracy[0].step else "before training"
        why = "The next evaluation will tell whether training helps."
        return "unsure", f"Held-out accuracy was {first} {when}.", [why]
    moved = accuracy[-1].mean - accuracy[0].mean
    change = f"{'rose' if moved > 0 else 'fell'} from {first} to {last}"
    headline = f"Held-out accuracy {change if moved else f'stayed at {first}'}."
    test = tested(run, run)
    if test is None:
        return "unsure", headline, ["Not tested: evaluations.jsonl does not hold both ends."]
    tone = "unsure" if test.p >= _SURE else "good" if test.difference > 0 else "bad"
    return tone, headline, _reasons(run, test, tone)


def _reasons(run: Run, test: Paired, tone: str) -> list[str]:
    old, new = (run.scores[end]["greedy"] for end in (0, -1))
    better = sum(after > before for before, after in zip(old, new, strict=True))
    worse = sum(after < before for before, after in zip(old, new, strict=True))
    believe = "Do not believe a change yet" if tone == "unsure" else "Believe it"
    often = "less than once in 1,000 times" if test.p < 0.001 else f"in {percent(test.p)} of cases"
    reasons = [
        f"{believe}: of {len(old)} problems that it never trained on, it does better on {better} "
        f"and worse on {worse} than before.",
        f"Chance alone would do as much {often} (paired test). With 95 % confidence the change is "
        f"{100 * test.low:+.1f} to {100 * test.high:+.1f} points.",
    ]
    if tone == "unsure" or len(old) < _FEW:
        width = 50 * (test.high - test.low)
        reasons.append(
            f"{len(old)} problems only show a change of about {width:.0f} points or more. Train "
            "longer, or evaluate on more problems (eval_dataset)."
        )
    if tone == "bad":
        reasons.append("Training made the model worse: take an earlier checkpoint.")
    return reasons


def _without_evaluation(run: Run) -> tuple[str, list[str]]:
    rewards = [r for r in (number(each.get("reward")) for each in run.steps) if r is not None]
    if not rewards:
        return "No step is done yet.", ["Reload this page when the run has written it anew."]
    tenth = -(-len(rewards) // 10)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    return f"The training reward went from {first:.2f} to {last:.2f}.", [
        "Do not believe in progress yet: no held-out evaluation was recorded, and a reward can "
        "rise without better answers. Set eval_dataset."
    ]


def findings(run: Run) -> list[dict[str, Any]]:
    """Those that are open first, each with the step at which it ended."""
    found: list[dict[str, Any]] = []
    for line in run.findings:
        name = as_text(line.get("name")).replace("_", " ")
        if line.get("event") == "ends":
            for each in found:
                if each["name"] == name and each["until"] is None:
                    each["until"] = line["step"]
        else:
            texts = {key: as_text(line.get(key) or "") for key in ("evidence", "key", "remedy")}
            since = number(line.get("since")) or line["step"]
            found.append({"name": name, "since": since, "until": None, **texts})
    return sorted(found, key=lambda each: (each["until"] is not None, each["since"]))


def _facts(run: Run) -> dict[str, str]:
    total = number(run.config.get("num_steps"))
    seconds = [
        sum(number(each.get(key)) or 0 for each in lines)
        for key, lines in (("step_time", run.steps), ("time/eval", run.evaluations))
    ]
    tokens = number(run.steps[-1].get("num_tokens")) if run.steps else None
    best = max(scores(run, "accuracy"), key=lambda score: score.mean, default=None)
    facts = {
        "Steps": f"{run.steps_done} of {total}" if total else str(run.steps_done),
        "State": "finished" if total and run.steps_done >= total else _state(run),
        "Time": _duration(sum(seconds)),
        "of it evaluating": _duration(seconds[1]),
        "Tokens": f"{tokens:,.0f}" if tokens is not None else "",
        "Best accuracy": f"{percent(best.mean)} after step {best.step}" if best else "",
    }
    return {name: value for name, value in facts.items() if value}


def _state(run: Run) -> str:
    """Of a run that has not made all its steps."""
    keys = run.config.get("evaluation", {})
    goals = {key: keys.get(key) for key in ("stop_at", "patience")}
    reason = should_stop(run.evaluations, metric=keys.get("keep_best"), **goals)
    if reason:
        return reason
    files = [run.folder / f"{name}.jsonl" for name in ("metrics", "starts")]
    last = max(file.stat().st_mtime for file in files if file.is_file())
    when = datetime.fromtimestamp(last, UTC)
    return f"running or interrupted; last record {when:%Y-%m-%d %H:%M} UTC"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
