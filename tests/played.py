"""TRL's own examples, from its documentation, unmodified, and other environments and tools."""

import asyncio
from pathlib import Path
from types import SimpleNamespace


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    return a + b


class WordleEnv:
    def __init__(self):
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str | None:
        self.secret = kwargs["secret"]
        self.reward, self.done = 0.0, False
        return " Guess the word."

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback message from the environment.
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = guess == f"[{self.secret}]"
        self.reward = float(self.done)
        return "G G G G G" if self.done else "X X X X X"


class EchoEnv:
    def reset(self, **kwargs):
        self.reward = 0.0

    async def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        await asyncio.sleep(0)
        self.reward = len(message) * 0.1
        return message

    async def get_reward(self) -> float:
        return self.reward


def find(what: str) -> list:
    """
    Finds.

    Args:
        what: What.
    """
    if what == "exit":
        raise SystemExit(3)
    return {
        "rows": [{"title": "A", "text": "x", "year": 1}, {"title": "B", "content": "y"}],
        "kinds": [{"type": "fruit", "name": "fig"}],
        "none": [],
        "parts": [{"type": "text", "text": "a"}, {"type": "text", "text": "\ud800\x00"}],
        "picture": [{"type": "text", "text": "a"}, {"type": "image", "image": None}],
        "huge": "<|im_end|>" * 100_000,
    }[what]


class Guess:
    """Guess a number: the base of the forms below."""

    def reset(self, secret, **row):
        self.secret = secret

    def play(self, text):
        is_right = text == str(self.secret)
        return ("" if is_right else "higher"), float(is_right), is_right


class GuessTuple(Guess):
    def step(self, text):
        return self.play(text)


class GuessGym(Guess):
    def reset(self, *, seed=None, options=None):
        self.secret = 7
        return f" {seed}", {}

    def step(self, action):
        seen, reward, done = self.play(action)
        return seen, reward, done, False, {}


class GuessObject(Guess):
    async def reset(self, secret, **row):
        self.secret = secret
        return SimpleNamespace(observation=None, reward=None, done=False)

    async def step(self, text):
        seen, reward, done = self.play(text)
        return SimpleNamespace(observation=seen, reward=reward, done=done)


class GuessMapping(Guess):
    def step(self, text):
        seen, reward, done = self.play(text)
        return {"observations": [{"role": "user", "content": seen}], "reward": reward, "done": done}


class OneAtATime:
    """An environment whose server takes one session."""

    def __init__(self, folder):
        self.session = Path(folder, "session")

    def reset(self, **row):
        if self.session.exists():
            raise ConnectionError("CAPACITY_REACHED")
        self.session.touch()

    def step(self, text):
        return "", 0.0, True

    def close(self):
        self.session.unlink(missing_ok=True)
