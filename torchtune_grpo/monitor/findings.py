"""What is wrong with a run, and what to change: its metrics -> findings. No torch here.

A finding begins when its signs were there in some steps in a row, and ends when they were not. It
is a function of the lines of ``metrics.jsonl``: a resumed run that reads them again finds the same.
The rules are in ``_finding_rules.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torchtune_grpo.monitor.finding_inputs import Run, Settings
from torchtune_grpo.monitor.finding_rules import BEGINS_AFTER, OF_EVALUATION, of_evaluation, of_step

__all__ = ["Finding", "FindingsWatch", "Settings"]

# In a row without its signs before a finding ends: one good step between bad ones ends none.
ENDS_AFTER = 5


@dataclass(frozen=True)
class Finding:
    """What is wrong."""

    name: str  # as docs/findings.md calls it
    since: int  # the first step with its signs
    evidence: str  # a sentence with the numbers
    key: str  # the config key to change
    remedy: str  # a sentence: to what


@dataclass
class _State:
    """Of a finding: records in a row that have its signs, and that lack them."""

    seen: int = 0
    lacking: int = 0
    since: int = 0
    finding: Finding | None = None


class FindingsWatch:
    """Reads a run's metrics line by line, and says which findings begin and end.

    Args:
        settings (Settings): the run's config.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._run = Run(settings)
        self._states = {name: _State() for name in BEGINS_AFTER}

    def add(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Reads the next line of ``metrics.jsonl``, of a step or of an evaluation.

        Args:
            record (Mapping[str, Any]): any metric may be missing, null or not finite.

        Returns:
            list[dict[str, Any]]: the lines for ``findings.jsonl``: ``step``, ``event`` ("begins" or
            "ends") and the fields of :class:`Finding`.
        """
        is_evaluation = self._run.add(record)
        rules = of_evaluation if is_evaluation else of_step
        signs: dict[str, list[str]] = {}
        for name, *found in rules(self._run, self._settings):
            signs.setdefault(name, found)
        return [
            {"step": record["step"], "event": event} | asdict(finding)
            for name, state in self._states.items()
            if (name in OF_EVALUATION) == is_evaluation
            for event, finding in self._events(name, state, signs.get(name), record["step"])
        ]

    def _events(
        self, name: str, state: _State, signs: list[str] | None, step: int
    ) -> Iterator[tuple[str, Finding]]:
        if signs is None:
            state.seen, state.lacking = 0, state.lacking + 1
            if state.finding and state.lacking == ENDS_AFTER:
                yield "ends", state.finding
                state.finding = None
            return
        state.since = state.since if state.seen else step
        state.seen, state.lacking = state.seen + 1, 0
        steps, groups = BEGINS_AFTER[name]
        steps = max(steps, math.ceil(groups / self._settings.keys["batch_size"]))
        if not state.finding and state.seen >= steps:
            state.finding = Finding(name, state.since, *signs)
            yield "begins", state.finding

    @property
    def current(self) -> list[Finding]:
        """Those that have begun and not ended."""
        return [state.finding for state in self._states.values() if state.finding]
