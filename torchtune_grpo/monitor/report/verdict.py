"""What a run has achieved, in plain sentences: did it help, is that certain, what went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tqdm import tqdm

from torchtune_grpo.evaluation.statistics import (
    SURE,
    Comparison,
    Paired,
    scores_of,
    should_stop,
    title_of,
)
from torchtune_grpo.monitor.record import RUN_FILE, Record, RunRecord

_FEW = 50  # held-out problems: the 95 % interval of 0.5 is then 0.28 wide


def verdict(run: RunRecord) -> dict[str, Any]:
    """The headline, whether to believe it and why, a table, facts about the run, and findings."""
    compared = Comparison.of_run(run.evaluations)
    if compared is None:
        tone, (headline, why) = "unsure", _without_evaluation(run)
    else:
        headline = compared.headline
        tone, why = _judge(compared)
        if compared.fall is not None:
            tone, why = "bad", _of_a_fall(compared, run)
    shown = {"tone": tone, "headline": headline, "why": why}
    table = _scores(compared) if compared else []
    return {**shown, "scores": table, "facts": _facts(run), "findings": findings(run)}


def _judge(compared: Comparison) -> tuple[str, list[str]]:
    """Say whether a run is good, bad or unsure, and why."""
    if compared.before is compared.after:
        return "unsure", ["The next evaluation will show whether training helps."]
    test = compared.changes.get("accuracy")
    if test is None:
        return "unsure", ["Not tested: the two evaluations are not of the same problems."]
    tone = "unsure" if test.p >= SURE else "good" if test.difference > 0 else "bad"
    return tone, _reasons(compared, test, tone)


def _reasons(compared: Comparison, test: Paired, tone: str) -> list[str]:
    old, new = (each["prompts"]["accuracy"] for each in (compared.before, compared.after))
    better = sum(after > before for before, after in zip(old, new, strict=True))
    worse = sum(after < before for before, after in zip(old, new, strict=True))
    believe = "Do not believe a change yet" if tone == "unsure" else "Believe it"
    often = "less than once in 1,000 times" if test.p < 0.001 else f"in {test.p:.1%} of cases"
    reasons = [
        f"{believe}: of {len(old)} problems that it never trained on, it does better on {better} "
        f"and worse on {worse} than before.",
        f"Chance alone would do as much {often} (paired test).",
    ]
    if tone == "unsure" or len(old) < _FEW:
        width = (test.high - test.low) / 2
        reasons.append(
            f"{len(old)} problems only show a change of about {width:.2f} or more. Train "
            "longer, or evaluate on more problems (eval_dataset)."
        )
    if title_of("accuracy", compared.after) != "accuracy":
        reasons.append("No reward is known to tell right from wrong; evaluation.reward names one.")
    if tone == "bad":
        reasons.append("Training made the model worse: take an earlier checkpoint.")
    return reasons


def _of_a_fall(compared: Comparison, run: RunRecord) -> list[str]:
    assert compared.best is not None and compared.fall is not None
    step = compared.best["step"]
    folder = run.folder / f"step_{step:06d}"
    take = f"Take {folder.name}."
    if not folder.exists():
        take = "Its checkpoint is not there: evaluation.keep_best=eval/accuracy would have kept it."
    return [
        f"The policy was better after step {step} than it is now: chance alone would do as much in "
        f"{compared.fall.p:.1%} of cases (paired test). {take}",
        "Most often the learning rate is too high, or training has gone on for too long.",
    ]


def _without_evaluation(run: RunRecord) -> tuple[str, list[str]]:
    rewards = [each["reward"] for each in run.steps if each.get("reward") is not None]
    if not rewards:
        return "No step is done yet.", ["Reload this page when the run has written it anew."]
    tenth = -(-len(rewards) // 10)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    return f"The training reward went from {first:.2f} to {last:.2f}.", [
        "Do not believe in progress yet: no held-out evaluation was recorded, and a reward can "
        "rise without better answers. Set eval_dataset."
    ]


def _scores(compared: Comparison) -> list[Record]:
    """A row for each held-out number: before, after and the change, with their intervals."""
    table = []
    for name in scores_of(compared.after):
        cells = []
        for each in compared.ends:
            if score := scores_of(each).get(name):
                text, _, interval = str(score).partition(" ")
                cells.append({**score._asdict(), "text": text, "interval": interval})
        change, _, test = str(compared.changes.get(name, "")).partition(" ")
        label = _label(name, compared.after)
        table.append({"label": label, "ends": cells, "change": change, "test": test})
    return table


def _label(name: str, evaluation: Mapping[str, Any]) -> str:
    if (title := title_of(name, evaluation)) != name:
        return title
    kind, _, k = name.partition("@")
    if kind == "accuracy":
        return "Accuracy: greedy answers"
    if kind == "maj":
        return f"{name}: the majority of {k} samples"
    return "pass@1: sampled answers" if k == "1" else f"{name}: one of {k} samples is right"


def findings(run: RunRecord) -> list[Record]:
    """Return the findings, open ones first, each with the step at which it ended."""
    found: list[Record] = []
    for event in run.findings:
        name = event["name"].replace("_", " ")
        if event["event"] == "ends":
            for each in found:
                if each["name"] == name and each["until"] is None:
                    each["until"] = event["step"]
        else:
            found.append({**event, "name": name, "until": None})
    return sorted(found, key=lambda each: (each["until"] is not None, each["since"]))


def _facts(run: RunRecord) -> dict[str, str]:
    total = run.config.get("num_steps")
    evaluating = sum(each.get("time/eval") or 0 for each in run.evaluations)
    seconds = evaluating + sum(each.get("step_time") or 0 for each in run.steps)
    facts = {
        "Steps": f"{run.steps_done} of {total}" if total else str(run.steps_done),
        "State": "finished" if total and run.steps_done >= total else _state(run),
        "Time": tqdm.format_interval(seconds),
        "of which evaluating": tqdm.format_interval(evaluating),
    }
    if run.steps and run.steps[-1].get("num_tokens") is not None:
        facts["Tokens"] = f"{run.steps[-1]['num_tokens']:,.0f}"
    return facts


def _state(run: RunRecord) -> str:
    """Return the state of a run that has not done all its steps."""
    keys = run.config.get("evaluation", {})
    goals = {key: keys.get(key) for key in ("stop_at", "patience")}
    reason = should_stop(run.evaluations, metric=keys.get("keep_best"), **goals)
    if reason:
        return reason
    when = datetime.fromtimestamp((run.folder / RUN_FILE).stat().st_mtime, UTC)
    return f"running or interrupted; last record {when:%Y-%m-%d %H:%M} UTC"
