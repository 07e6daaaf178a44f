"""Start scripts in processes that have imported what a run imports, which takes seconds.

As a script, this is the server, one for all workers of a pytest. It forks itself for each who
connects, and there for each process of a request. A forked process has its own folder, arguments,
environment and files. Two things are not as in any interpreter: what an import reads from the
environment is as the server found it, and a process that ends well, or by `sys.exit`, does not take
the modules apart, which would touch, and so copy, all of their memory.
"""

import atexit
import ctypes
import fcntl
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

TIMEOUT = 300  # seconds of one process
PR_SET_PDEATHSIG = 1  # of prctl(2)
_of_thread = threading.local()

# One thread, and kernels that give the same bits on every x86 CPU with AVX2: tests/golden.
PINNED = {
    "OMP_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment, with pinned kernels and some changes."""
    return {**os.environ, **PINNED, **changes}


class ForkServer:
    """Connection to the server, a process that forks on demand; starts it if nobody has."""

    def __init__(self) -> None:
        name = f"\0fork_server_{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
        _start(name)
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(name)
        self._connection.settimeout(TIMEOUT)
        self._lines = self._connection.makefile("rw")
        self.pid = int(self._lines.readline())

    def run(
        self, *arguments: str, cwd: Path, envs: Sequence[dict[str, str]]
    ) -> list[tuple[int, str, str]]:
        """Run ``python ARGUMENTS``, a path, or ``-m`` and a module, once for each environment.

        All at the same time; when one fails, the others are terminated, as torchrun does.

        Returns:
            Exit code, stdout and stderr of each.
        """
        with TemporaryDirectory() as folder:
            files = [
                [str(Path(folder, f"{name}_{rank}")) for name in ("out", "err")]
                for rank in range(len(envs))
            ]
            for file in chain(*files):
                Path(file).touch()
            request = [
                {"arguments": arguments, "cwd": str(cwd), "env": env, "files": pair}
                for env, pair in zip(envs, files, strict=True)
            ]
            reply = ""
            print(json.dumps(request), file=self._lines, flush=True)
            with suppress(TimeoutError):
                reply = self._lines.readline()
            texts = [[Path(file).read_text() for file in pair] for pair in files]
            why = f"no reply within {TIMEOUT} s, or the server has ended"
            said = "".join(f"\n{out[-2000:]}\n{err[-4000:]}" for out, err in texts)
            if not reply:
                self._connection.shutdown(socket.SHUT_RDWR)  # which ends what still runs
                vars(_of_thread).pop("server", None)  # the next test connects anew
                raise AssertionError(f"{arguments}: {why}:{said}")
            return [(code, out, err) for code, (out, err) in zip(json.loads(reply), texts)]


def fork_server() -> ForkServer:
    """Return this thread's server."""
    if not hasattr(_of_thread, "server"):
        _of_thread.server = ForkServer()
    return _of_thread.server


def _start(name: str) -> None:
    """Start the server, unless there is one of this name; it serves until this process ends."""
    with socket.socket(socket.AF_UNIX) as listener, suppress(OSError):  # the name is taken
        listener.bind(name)
        listener.listen()
        command = [sys.executable, __file__, str(listener.fileno())]
        hidden = environment(CUDA_VISIBLE_DEVICES="")  # no forked process could use one
        process = subprocess.Popen(
            command, env=hidden, stdin=subprocess.PIPE, pass_fds=[listener.fileno()]
        )
        atexit.register(process.communicate)  # closes its stdin, and waits


def become(*, cwd: str, env: dict[str, str], files: list[str]) -> None:
    """Give the forked process its own folder, environment, stdin, stdout and stderr."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, file in enumerate([os.devnull, *files]):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    random.seed()
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))


def execute(arguments: list[str]) -> None:
    """Execute what ``python ARGUMENTS`` would."""
    sys.orig_argv = [sys.executable, *arguments]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")


def end_quickly() -> None:
    """End the process; called at exit after all others, when threads have been waited for."""
    gc.collect()  # whose finalizers may have something to say
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def accepted(listener: socket.socket) -> socket.socket:
    """Fork for each connection, until stdin ends; return the connection in the forked process."""
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.setsid()
            return connection
        connection.close()
    os._exit(0)


def next_request(connection: socket.socket) -> dict:
    """Fork for each process of each request; return, in that process, what it is to run."""
    lines = connection.makefile("rw")
    print(os.getpid(), file=lines, flush=True)
    for line in lines:
        running: list[int] = []
        for process in json.loads(line):
            if (child := os.fork()) == 0:
                connection.close()
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                return process
            running.append(child)
        flags = fcntl.fcntl(connection, fcntl.F_GETFL)
        fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
        # Who asks and goes, as a pytest that is killed, ends this process by SIGIO, and so those.
        fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
        codes = wait_for(running)
        fcntl.fcntl(connection, fcntl.F_SETFL, flags)
        print(json.dumps(codes), file=lines, flush=True)
    os._exit(0)


def wait_for(children: list[int]) -> list[int]:
    """Return the exit codes of processes; the first one that fails ends the others."""
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
        if codes[child] != 0:
            for other in set(children) - set(codes):
                os.kill(other, signal.SIGTERM)
    return [codes[child] for child in children]


if __name__ == "__main__":
    exit_code = 0
    gc.disable()  # while importing
    os.fsync = lambda descriptor: None  # as in conftest.py
    atexit.register(end_quickly)  # the first one is called last
    import datasets  # noqa: F401
    import torchtune._cli.tune
    import torchtune.models.llama3_2
    import torchtune.models.qwen2_5
    import torchtune.training.metric_logging  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    import transformers.models.qwen3  # noqa: F401
    from transformers import AutoConfig, AutoTokenizer  # noqa: F401

    import torchtune_grpo.config.command_line
    import torchtune_grpo.monitor.report  # noqa: F401

    recipe = torchtune_grpo.config.command_line.recipes_folder() / "grpo_full_finetune.py"
    runpy.run_path(str(recipe), run_name="imports")
    assert threading.active_count() == 1  # threads do not survive a fork
    gc.collect()
    gc.freeze()
    gc.enable()
    weakref.finalize._registry.clear()  # at exit, torch would take its operators apart
    request = next_request(accepted(socket.socket(fileno=int(sys.argv[1]))))
    arguments = request.pop("arguments")
    become(**request)
    try:
        execute(arguments)
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except BaseException:
        atexit.unregister(end_quickly)
        raise
