"""Sessions: a process with an environment for each conversation."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torchtune_grpo.environments.adapters import Recipe, Reply, Turn
from torchtune_grpo.machine.parallel import rank, world_size
from torchtune_grpo.sandbox.remote import ObjectServer, RemoteObject


@dataclass
class Kind:
    """A kind of environment: what the policy may do, and the sessions with it."""

    name: str
    recipe: Recipe
    schemas: Sequence[Mapping[str, object]]  # of all tools
    timeout: float
    has_reward: bool = False  # get_reward
    idle: list[Session] = field(default_factory=list, init=False)
    _open: list[Session] = field(default_factory=list, init=False)
    _num_made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        recipe = f"{Recipe.__module__}.{Recipe.__name__}"
        self._server = ObjectServer([recipe, *self.recipe.dotpaths])
        atexit.register(self.close)

    @property
    def adds_rewards(self) -> bool:
        """Whether its answers come with rewards."""
        return self.recipe.adapter.adds_rewards

    def session(self) -> Session:
        """Take a session that is not in use, or make a new one."""
        while self.idle:
            session = self.idle.pop()
            if not session.host.is_over:  # as when a reward asked it for too much
                return session
        self._num_made += 1
        seed = self._num_made * world_size() + rank()  # of what its constructor draws
        host = RemoteObject(self._server, self.recipe.make, seed, timeout=self.timeout)
        self._open.append(Session(self, host))
        return self._open[-1]

    def drop(self, session: Session) -> None:
        """Close a session that cannot be used again, and do not wait for it."""
        session.host.close()
        self._open[:] = [each for each in self._open if not each.host.is_over]

    def close(self) -> None:
        """Close all sessions, those in use, too, and wait a few seconds for them."""
        atexit.unregister(self.close)
        for session in self._open:
            session.host.close()
        self._server.close()
        self._open.clear()
        self.idle.clear()


class Session:
    """An environment that is in use by one conversation at a time; ``reset`` begins the next.

    All calls wait. They raise an ObjectError for what the environment raises, or ObjectLost, after
    which the session cannot be used again.
    """

    def __init__(self, kind: Kind, host: RemoteObject) -> None:
        self.kind, self.host = kind, host

    @property
    def environment(self) -> object:
        """What stands in for the user's object in rewards."""
        return None if self.kind.recipe.component is None else StandIn(self.host)

    def reset(self, row: Mapping[str, object], seed: int) -> str | None:
        """Begin a conversation about a row of the data; return what is added to its prompt.

        What is drawn at random until the next one depends on the seed.
        """
        return self.host.call("reset", row, seed)

    def answer(self, turn: Turn) -> Reply:
        return Reply(*self.host.call("answer", turn))

    def reward(self) -> float | None:
        return self.host.call("reward")


class StandIn:
    """Stands in for an environment in another process: its methods, and its attributes' values."""

    def __init__(self, host: RemoteObject) -> None:
        self._host = host

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        kind, value = self._host.call("look", name)
        if kind == "missing":
            raise AttributeError(value)
        if kind == "async method":
            return partial(self._use_async, name)
        return partial(self._use, name) if kind == "method" else _plain(name, kind, value)

    def _use(self, name: str, *args: object, **kwargs: object) -> object:
        return _plain(f"{name}()", *self._host.call("use", name, args, kwargs))

    async def _use_async(self, name: str, *args: object, **kwargs: object) -> object:
        return self._use(name, *args, **kwargs)


def _plain(name: str, kind: str, value: object) -> object:
    if kind == "not plain":
        raise TypeError(
            f"environments: {name} is a {value}, which cannot leave the environment's process; "
            "return plain data."
        )
    return value
