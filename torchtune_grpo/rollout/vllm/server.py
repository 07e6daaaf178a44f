"""vLLM on a server: weights through a folder, token ids over HTTP.

A connection may break, and the server may start anew, with old weights. So weights have a version,
which each request reports at its end, and which the server is asked for when one was lost.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4

from safetensors.torch import save_file
from torchtune import utils

from torchtune_grpo.config.text import describe, shortened
from torchtune_grpo.machine import interrupt
from torchtune_grpo.machine.loop import in_thread
from torchtune_grpo.machine.parallel import gathered, on_first_rank
from torchtune_grpo.rollout.request import Capabilities, EngineContext, RolloutRequest
from torchtune_grpo.rollout.vllm.engine import MAX_MODEL_LEN, MAX_ROWS, VLLMBase
from torchtune_grpo.rollout.vllm.rows import NewTokens

log = utils.get_logger("INFO")

LOSSES = 5  # of one request, after which another try would not help
_WAIT = 0.05  # seconds for tokens, after which a rollout looks at deadlines and replies


class VLLMServer(VLLMBase):
    """Generation by a ``vllm serve`` at a ``url``, started as docs/hardware.md says.

    It serves the folder ``policy`` in ``shared``, which has the same path there as here: a link to
    a folder with the current weights, written anew for each rollout, adapters merged. A server that
    does not answer has ``patience`` seconds to come back. All ranks share it.
    """

    reproducible = False  # the server decides which rows it computes side by side

    def __init__(
        self,
        context: EngineContext,
        *,
        url: str,
        shared: str,
        max_model_len: int = MAX_MODEL_LEN,
        patience: float = 600.0,
    ) -> None:
        super().__init__(context, max_model_len=max_model_len)
        self._shared = Path(shared).absolute()
        needs = {
            "model": str(self._shared / "policy"),
            "dtype": str(self._weights.dtype).removeprefix("torch."),
            "max_model_len": str(self._max_model_len),
            "logprobs_mode": "processed_logprobs",
        }
        self._server = Server(url.rstrip("/"), patience=patience, needs=needs)

    @classmethod
    def capabilities(  # type: ignore[override]
        cls, *, url: str, shared: str, **arguments: Any
    ) -> Capabilities:
        return super().capabilities(**arguments)

    @contextmanager
    def _vllm(self, request: RolloutRequest) -> Iterator[ServerRequests]:
        with gathered(self._model):
            folder = on_first_rank(self._publish)
        rows = self._context.settings.max_rows or MAX_ROWS
        yield ServerRequests(self._server, folder, limit=rows)

    def _publish(self) -> Path:
        """Write the current weights into a new folder, which no file system's cache can know."""
        folder = self._shared / f"policy-{uuid4().hex}"
        folder.mkdir(parents=True)
        config = json.loads(Path(self._context.model_dir, "config.json").read_text("utf-8"))
        config |= {"vocab_size": self._vocab, "tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        weights = self._weights.untied(vocab=self._vocab)
        by_layer = groupby(weights, key=lambda weight: weight[0].split(".")[:3])
        for number, (_, layer) in enumerate(by_layer):  # no more than a layer is held twice
            tensors = {name: weight.contiguous() for name, weight in layer}
            save_file(tensors, folder / f"{number}.safetensors", {"format": "pt"})
        link = self._shared / "policy.new"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(self._shared / "policy")
        self._server.bring(folder)
        for old in {*self._shared.glob("policy-*")} - {folder}:
            shutil.rmtree(old)
        return folder


class Server:
    """A ``vllm serve`` at a ``url`` with the settings that a run ``needs``."""

    def __init__(self, url: str, *, patience: float, needs: dict[str, str]) -> None:
        self._url, self._patience, self._needs = url, patience, needs

    def bring(self, folder: Path) -> None:
        """Load the weights in a folder, whose name is their version.

        If it does not answer, it has ``patience`` seconds to start. Raises a ValueError if it does
        not, or if it refuses.
        """
        end, is_told = time.monotonic() + self._patience, False
        while not interrupt.is_interrupted():
            try:
                return self._bring(folder)
            except OSError as error:
                why = shortened(describe(error), 200)
                if time.monotonic() > end:
                    raise self._error(
                        f"has not answered for {self._patience:g} s ({why}). Start it, and go on "
                        "with resume_from_checkpoint=True"
                    ) from error
                if not is_told:
                    log.warning(f"Waiting for {self._url} ({why}): {self._command}")
                is_told = True
                time.sleep(1)

    def _bring(self, folder: Path) -> None:
        if self._ask("/weight_info").json()["weight_version"] == folder.name:
            return
        config = self._ask("/server_info?config_format=json").json()["vllm_config"]["model_config"]
        for name, value in self._needs.items():
            if (found := str(config[name]).removeprefix("torch.")) != value:
                raise self._error(f"has {name}={found}, and the run needs {value}")
        self._ask("/pause", {})  # ends all requests, and empties the cache
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._ask("/collective_rpc", reload)
        self._ask("/resume", {})
        self._ask("/update_weight_version", {"new_version": folder.name})  # now it has them

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a request's new tokens as they arrive; raises an OSError if the request is lost."""
        with self._ask("/inference/v1/generate", body | {"stream": True}) as reply:
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "choices" not in event:
                        raise OSError(shortened(str(event)))
                    yield event["choices"][0]
        raise OSError("the connection has ended")

    def _ask(self, route: str, body: dict[str, Any] | None = None) -> Any:
        """Return the reply; raises an OSError if the server is down, a ValueError if it refuses."""
        import requests  # it takes a tenth of a second

        method, timeout = "GET" if body is None else "POST", (10, self._patience)
        url = f"{self._url}{route}"
        reply = requests.request(method, url, json=body, timeout=timeout, stream=True)
        if not reply.ok:
            why = f"{route}: HTTP {reply.status_code}: {shortened(reply.text, 300)}"
            if reply.status_code >= 500 and not requests.get(f"{self._url}/health", timeout=10).ok:
                raise OSError(why)
            raise self._error(f"refuses {why}")
        return reply

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"rollout.engine.url={self._url}: {problem}: {self._command}")

    @property
    def _command(self) -> str:
        """The command that starts such a server."""
        model, *options = self._needs.items()
        words = [f"--{name.replace('_', '-')} {value}" for name, value in options]
        start = f"VLLM_SERVER_DEV_MODE=1 vllm serve {model[1]} --tokens-only"
        return " ".join([start, *words])


class ServerRequests:
    """Requests to a server with the weights in ``folder``, at most ``limit`` at once.

    A request that is lost, or whose tokens other weights have sampled, ends with "abort" once the
    server has these weights again.
    """

    def __init__(self, server: Server, folder: Path, *, limit: int) -> None:
        self._server, self._folder = server, folder
        self._slots = threading.Semaphore(limit)
        self._open: dict[str, dict[str, Any]] = {}  # the bodies of requests
        self._events: SimpleQueue[tuple[str, dict[str, Any], Any]] = SimpleQueue()
        self._losses = Counter[str]()

    def add(self, name: str, tokens: list[int], settings: dict[str, Any]) -> None:
        salt = self._folder.name
        body = {"token_ids": tokens, "sampling_params": settings, "cache_salt": salt}
        self._open[name] = body
        in_thread(self._read, name, body)

    def step(self) -> list[NewTokens]:
        try:
            name, body, event = self._events.get(timeout=_WAIT)
        except Empty:
            return []
        if self._open.get(name) is not body:
            return []
        if isinstance(event, OSError):
            self._losses[name] += 1
            if self._losses[name] > LOSSES:
                raise ValueError(f"rollout.engine.url: requests are lost again and again: {event}")
            self._server.bring(self._folder)
            event = {"token_ids": (), "logprobs": None, "finish_reason": "abort"}
        elif isinstance(event, Exception):
            raise event
        if event["finish_reason"]:
            del self._open[name]
        logprobs = [entry["logprob"] for entry in (event["logprobs"] or {}).get("content", ())]
        return [NewTokens(name, event["token_ids"], logprobs, event["finish_reason"])]

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            self._open.pop(name, None)

    def _read(self, name: str, body: dict[str, Any]) -> None:
        """Take what the server sends for a request until it is over, in a thread of its own."""
        with self._slots:
            try:
                for event in self._server.stream(body) if self._open.get(name) is body else ():
                    if self._open.get(name) is not body:
                        return  # which closes the connection, and so tells the server
                    self._check_versions(event)
                    self._events.put((name, body, event))
            except Exception as error:  # the rollout raises it
                self._events.put((name, body, error))

    def _check_versions(self, event: dict[str, Any]) -> None:
        """Raise an OSError if a request ends, but not by itself, or not with our weights alone."""
        spans, reason = event["weight_versions"], event["finish_reason"]
        if reason and (
            reason not in ("stop", "length") or {s["version"] for s in spans} != {self._folder.name}
        ):
            raise OSError(f"a request has ended with {reason}, and with other weights: {spans}")
