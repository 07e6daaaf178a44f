"""How mistakes reach the user: several at once, and each as one line."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from torchtune_grpo.config.text import visible

# In the environment: set it to see where an error was raised.
TRACEBACK = "TORCHTUNE_GRPO_TRACEBACK"


class ConfigError(ValueError):
    """What is wrong with a config: sentences that name a key, its value and the remedy."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class FirstRankFailed(RuntimeError):
    """What the other ranks raise when the first one fails; that one tells why."""


class Problems(list[str]):
    """Collects what is wrong, so that one run of the checks tells all of it."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes a ValueError of the block, and goes on behind it."""
        try:
            yield
        except ValueError as error:
            self += problems_in(error)

    def raise_any(self) -> None:
        """Raises a ConfigError if there are any."""
        if self:
            raise ConfigError(self)


def problems_in(error: BaseException) -> list[str]:
    """An error's message; of several mistakes, one each. Control characters are spelled out."""
    problems = getattr(error, "problems", None) or [str(error) or type(error).__name__]
    return [" ".join(visible(problem).split()) for problem in problems]


@contextmanager
def told_in_one_line(keep: Callable[[str], str | None] = lambda text: None) -> Iterator[None]:
    """Ends the process with exit code 1 where the block fails; the last line is ``Error: ...``.

    Config errors and this package's own (a reward that fails too often, a disk that is full) say
    what to do; of others, the traceback is printed above that line. ``TORCHTUNE_GRPO_TRACEBACK=1``
    prints all of them. What all ranks know is told once on each machine.

    Args:
        keep: is given the traceback, writes it to a file, and returns the file's path.
    """
    try:
        yield
    except Exception as error:
        trace = traceback.format_exc()
        file = keep(trace)
        rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
        others_tell = isinstance(error, ConfigError) and local_rank != "0"
        if not (others_tell or isinstance(error, FirstRankFailed)):
            _tell(error, trace, file, who="Error" if rank == "0" else f"Error on rank {rank}")
        sys.exit(1)


def _tell(error: Exception, trace: str, file: str | None, *, who: str) -> None:
    is_ours = type(error).__module__.startswith("torchtune_grpo.")
    says_it_all = isinstance(error, ValueError) or is_ours
    lines = [*getattr(error, "__notes__", ())]
    if os.environ.get(TRACEBACK) or not says_it_all:
        lines.append(trace)
    elif file:
        lines.append(f"Traceback: {file}")
    name = "" if says_it_all else f"{type(error).__name__}: "
    lines += [f"{who}: {name}{problem}" for problem in problems_in(error)]
    for bar in list(tqdm._instances):
        bar.close()  # or it would be drawn once more, behind the error
    print(visible("\n".join(lines)), file=sys.stderr, flush=True)
