"""Environments and tools as people write them, which other processes import."""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

# --- Tools -----------------------------------------------------------------------------------


def run_with_limit() -> str:
    """Waits for an alarm."""

    def ring(number, frame):
        raise TimeoutError("time is over")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        time.sleep(10)
    except TimeoutError as error:
        return str(error)


def meet(folder: str, name: str) -> str:
    """
    Waits for the others.

    Args:
        folder: Where.
        name: One's own name.
    """
    Path(folder, name).touch()
    while len(os.listdir(folder)) < 6:
        time.sleep(0.005)
    return "met"


def reset() -> str:
    """Resets."""
    return "a tool"


def get_reward() -> str:
    """Gets a reward."""
    return "another"


# --- Environments ----------------------------------------------------------------------------


class OfItsThread:
    """Keeps what belongs to a thread, or is global, from one call to the next."""

    def __init__(self):
        self.local = threading.local()

    def reset(self, **row):
        self.local.steps = 0
        random.seed(7)

    def step(self, text):
        self.local.steps += 1
        drawn = random.random()
        expected = random.Random(7)
        for _ in range(self.local.steps - 1):
            expected.random()
        is_right = drawn == expected.random()
        return f"{self.local.steps}", float(is_right), self.local.steps == 2


class OldLoop:
    """Runs coroutines as was usual before Python 3.10."""

    def reset(self, **row):
        pass

    def step(self, text):
        asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))
        return None, 1.0, True


class Scored:
    """Has attributes for rewards to look at."""

    def reset(self, **row):
        self.score, self.done, self.seen = 3, False, {"a": {1, 2}, "b": Decimal("0.5")}
        self.lock = threading.Lock()

    def add(self, more: int) -> int:
        """
        Adds to the score.

        Args:
            more: How much.
        """
        self.score += more
        return self.score

    async def later(self) -> int:
        """Returns the score, but not at once."""
        await asyncio.sleep(0)
        return self.score


class Drawn:
    """Draws its task and its answers at random."""

    def __init__(self):
        self.made = random.random()

    def reset(self, **row):
        self.task = random.randrange(10**9)
        return f" {self.task}"

    def step(self, text):
        return f"{random.randrange(10**9)}", random.random() + hash(text) % 7, False


class Bad:
    """Fails, as its row says, at some moment; `hang` needs a time limit."""

    def __init__(self):
        self.how, self.when = "fine", "-"

    def reset(self, how, when, **row):
        self.how, self.when = how, when
        self.behave("reset")

    def step(self, text):
        self.behave("step")
        return None, 1.0, True

    def get_reward(self):
        self.behave("get_reward")
        return 1.0

    def behave(self, now):
        if now == self.when:
            match self.how:
                case "raise":
                    raise KeyError("state")
                case "exit":
                    sys.exit(3)
                case "die":
                    os._exit(3)
                case "hang":
                    time.sleep(10_000)
                case "block":
                    re.match(r"(a+)+$", "a" * 60 + "b")  # holds Python's lock


class NeverMade:
    """Two of them can be made, also by processes at once."""

    def __init__(self, folder):
        for place in ("first", "second"):
            with suppress(FileExistsError):
                Path(folder, place).touch(exist_ok=False)
                return
        raise ConnectionError("no more of these")

    def reset(self, **row):
        pass

    def step(self, text):
        return None, 1.0, True


class Logged:
    """Starts a process, and notes in a file when it is closed.

    It takes ``seconds`` for that, and ``slowness`` for a step. ``end`` is the signal that its first
    ``reset`` sends to the run.
    """

    def __init__(self, folder, seconds=0.0, slowness=0.0, end=None):
        self.folder, self.end = Path(folder), end
        self.seconds, self.slowness = seconds, slowness
        self.child = subprocess.Popen(["sleep", "100"], start_new_session=True)
        (self.folder / f"child-{self.child.pid}").touch()

    def reset(self, **row):
        if self.end:
            stat = Path(f"/proc/{os.getppid()}/stat").read_text()
            run = int(stat.rpartition(")")[2].split()[1])  # its parent's parent
            os.kill(run, getattr(signal, self.end))
            self.end = None

    def step(self, text):
        (self.folder / "step").touch()
        time.sleep(self.slowness)
        return "more", 0.5, False

    def close(self):
        time.sleep(self.seconds)
        (self.folder / f"closed-{self.child.pid}").touch()


class Two(OfItsThread):
    def step(self, text):
        return True, {}


class Four(OfItsThread):
    def step(self, text):
        return "more", 0.25, len(text) > 1, {}


class Nothing(OfItsThread):
    def step(self, text):
        return {"observations": [], "reward": 0.5, "done": len(text) > 1}


class TrlStep:
    """TRL's protocol, with a tool that is called step."""

    def reset(self, **row):
        self.at = 0

    def step(self, direction: str) -> str:
        """
        Takes a step.

        Args:
            direction: Where to.
        """
        self.at += 1
        return f"{direction} {self.at}"
