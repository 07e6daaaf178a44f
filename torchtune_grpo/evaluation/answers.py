"""Answers to held-out prompts: how many are given at once, and a file that keeps them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtune_grpo.config.text import naming, to_json, write_text
from torchtune_grpo.data.dataset import Item
from torchtune_grpo.machine.parallel import gather_over_ranks, on_first_rank

_SHORT, _LONG = 30.0, 60.0  # seconds of a part whose answers are kept


@dataclass(frozen=True)
class Answer:
    """One response to a prompt."""

    completion: str  # as rewards see it
    tokens: int  # its length
    truncated: bool  # no stop token came in time
    scores: dict[str, float | None]  # by reward; 0 where one failed, None where it does not apply
    stated: dict[str, str | None]  # the answer that each reward sees, if it can name it


class KeptAnswers:
    """A file from which a killed evaluation goes on; every rank has to call each method.

    Its first line is a digest of what answers depend on, ``about``: weights, config, rows and the
    rewards' files. A file about anything else is begun anew.
    """

    def __init__(self, path: Path, about: object) -> None:
        self._path = path
        self._head = hashlib.sha256(json.dumps(to_json(about)).encode()).hexdigest()
        self._lines: list[dict[str, Any]] = on_first_rank(self._begin)

    def _begin(self) -> list[dict[str, Any]]:
        """Read the lines that are whole, and leave a file of these alone."""
        lines = []
        for line in self._path.read_bytes().splitlines() if self._path.exists() else ():
            try:
                lines.append(json.loads(line))
            except ValueError:  # a kill has torn it
                break
        known = lines[1:] if lines[:1] == [self._head] else []
        write_text(self._path, "".join(json.dumps(each) + "\n" for each in (self._head, *known)))
        return known

    def of(self, kind: str) -> dict[int, list[Answer]]:
        """Return the answers of a kind, by the prompt's position in the data set."""
        found: dict[int, list[Answer]] = {}
        for line in self._lines:
            if line["kind"] == kind:
                found[line["index"]] = [Answer(**each) for each in line["answers"]]
        return found

    def add(self, kind: str, answers: Mapping[int, Sequence[Answer]]) -> None:
        lines = [
            json.dumps({"kind": kind, "index": n, "answers": to_json([*map(asdict, each)])})
            for n, each in answers.items()
        ]

        def write() -> None:
            with naming(self._path), self._path.open("a") as file:
                file.writelines(f"{line}\n" for line in lines)

        on_first_rank(write)


def parts(items: list[Item], *, least: int, most: int, is_kept: bool) -> Iterator[list[Item]]:
    """Yield prompts that are to be answered together: ``most`` at once, fewer if they are kept.

    A kill loses the part that is being answered. A part that is kept therefore begins with
    ``least`` prompts. It grows while it takes less than half a minute, or while twice as many
    prompts take not much longer, as on a GPU; beyond a minute it shrinks, but not below ``least``,
    where answers one by one would be slow. So a kill loses about a minute, or as long as ``least``
    prompts take, and twice that in the second part, which finds out whether more are faster.
    """
    start, size, rate = 0, least if is_kept else most, 0.0
    while start < len(items):
        size = min(size, most)
        part = items[start : start + size]
        begun = time.monotonic()
        yield part
        start += len(part)
        if is_kept:
            seconds = max(gather_over_ranks(time.monotonic() - begun))
            before, rate = rate, len(part) / max(seconds, 1e-9)
            if seconds < _SHORT or rate > 1.5 * before:
                size *= 2
            elif seconds > _LONG:
                size = max(least, size // 2)
