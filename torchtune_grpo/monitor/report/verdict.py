"""Verdict on a run, in plain sentences: did it help, is that certain, what went wrong."""

from __future__ import annotations

from datetime import UTC, datetime

from tqdm import tqdm

from torchtune_grpo.evaluation.statistics import Comparison, kind_of, should_stop
from torchtune_grpo.monitor.record import (
    RUN_FILE,
    STILL_THE_BASE,
    Record,
    RunRecord,
    changes_weights,
    metric,
)


def verdict(run: RunRecord) -> dict[str, object]:
    """The headline, whether to believe it and why, a table, facts about the run, and findings."""
    compared = Comparison.of_run(run.evaluations)
    if compared is None:
        tone, (headline, why) = "unsure", _without_evaluation(run)
    else:
        tone, headline, why = compared.tone, compared.headline, compared.reasons
    if run.steps and not any(map(changes_weights, run.steps)):
        plan = "The run is too short for findings: `torchtune-grpo plan` looks for the cause."
        why = [headline, "The findings say why." if run.findings else plan]
        tone, headline = "bad", STILL_THE_BASE
    scores: list[Record] = []
    for label, ends, change in compared.rows if compared else ():
        known = [{**score._asdict(), "text": str(score)} for score in ends if score]
        scores.append({"label": label, "ends": known, "change": change})
    shown = {"tone": tone, "headline": headline, "why": why, "scores": scores}
    if compared:
        shown["kind"] = kind_of(compared.after).capitalize()
    return {**shown, "facts": _facts(run), "findings": findings(run)}


def _without_evaluation(run: RunRecord) -> tuple[str, list[str]]:
    rewards = [r for each in run.steps if (r := metric(each, "reward")) is not None]
    if not run.steps:
        return "No step is done yet.", ["Reload this page when the run has written it anew."]
    if not rewards:
        return "No answer has had a reward yet.", [
            "The findings, and each reward's curve, say why."
        ]
    tenth = -(-len(rewards) // 10)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    return f"The training reward went from {first:.2f} to {last:.2f}.", [
        "Whether answers are better is not known: there was no held-out evaluation (eval_dataset), "
        "and a reward can rise without better answers."
    ]


def findings(run: RunRecord) -> list[Record]:
    """Return the findings, open ones first, each with the step at which it ended."""
    found: list[Record] = []
    begun: dict[str, Record] = {}
    for event in run.findings:
        name = event["name"].replace("_", " ")
        if event["event"] == "ends":
            begun.pop(name, {})["until"] = event["step"]
        else:
            begun[name] = {**event, "name": name, "until": None}
            found.append(begun[name])
    return sorted(found, key=lambda each: (each["until"] is not None, each["since"]))


def _facts(run: RunRecord) -> dict[str, str]:
    total = run.config.get("num_steps")
    evaluating = sum(metric(each, "time/eval") or 0 for each in run.evaluations)
    seconds = evaluating + sum(metric(each, "step_time") or 0 for each in run.steps)
    facts = {
        "Steps": f"{run.steps_done} of {total}" if total else str(run.steps_done),
        "State": "finished" if total and run.steps_done >= total else _state(run),
        "Time": tqdm.format_interval(seconds),
        "of which evaluating": tqdm.format_interval(evaluating),
    }
    if run.steps and (tokens := metric(run.steps[-1], "num_tokens")) is not None:
        facts["Tokens"] = f"{tokens:,.0f}"
    return facts


def _state(run: RunRecord) -> str:
    """Return the state of a run that has not done all its steps."""
    keys = run.config.get("evaluation", {})
    metric, stop_at = keys.get("keep_best"), keys.get("stop_at")
    if reason := should_stop(run.evaluations, metric=metric, stop_at=stop_at):
        return reason
    when = datetime.fromtimestamp((run.folder / RUN_FILE).stat().st_mtime, UTC)
    return f"running or interrupted; last record {when:%Y-%m-%d %H:%M} UTC"
