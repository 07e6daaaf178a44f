"""A game of OpenEnv, and an environment that plays it on a server of its own."""

import socket
import subprocess
import sys
import time
from pathlib import Path

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Told(Observation):
    text: str


class Game(Environment):
    def reset(self, seed=None, episode_id=None, secret=7, **kwargs):
        self.secret = secret
        return Told(text="Guess a number.")

    def step(self, action, timeout_s=None, **kwargs):
        is_right = action.number == self.secret
        text = "right" if is_right else "higher" if action.number < self.secret else "lower"
        return Told(text=text, done=is_right, reward=float(is_right))

    @property
    def state(self):
        return State()


app = create_fastapi_app(Game, Guess, Told)


class Client(EnvClient):
    def _step_payload(self, action):
        return {"number": action.number}

    def _parse_result(self, payload):
        seen = Told(**payload["observation"])
        return StepResult(seen, reward=payload.get("reward"), done=payload.get("done", False))

    def _parse_state(self, payload):
        return State(**payload)


class PlayedOnItsServer:
    """As in TRL's documentation of OpenEnv: the client's calls are the tools."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "uvicorn", "openenv_game:app", "--port", str(port)]
        command += ["--app-dir", str(Path(__file__).parent)]
        self.server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self.client = Client(f"http://127.0.0.1:{port}")

    async def reset(self, secret, **row):
        deadline = time.monotonic() + 60
        while True:
            try:
                result = await self.client.reset(secret=secret)
                break
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        self.reward = 0.0
        return f" {result.observation.text}"

    async def guess(self, number: int) -> str:
        """
        Guesses a number.

        Args:
            number: The number.
        """
        result = await self.client.step(Guess(number=number))
        self.reward = result.reward
        return result.observation.text

    def get_reward(self) -> float:
        return self.reward

    async def close(self):
        await self.client.close()
        self.server.terminate()
