"""What a run recorded, read back: a JSON object with a ``step`` on each line. No torch here."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger("torchtune.utils._logging")  # torchtune's, by name


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Reads what a run recorded; a line that is torn is left out, and the log says so."""
    return [record for _, record in records(path)]


def records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line and what it says, but for those that a kill or a full disk has torn."""
    left_out = 0
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line.decode())
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield line, record
            else:
                left_out += 1
    if left_out:
        log.warning(f"{path}: left out {left_out} line(s) that are torn or have no step.")
