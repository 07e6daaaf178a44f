"""Code rewards: verdicts, leaks and speed on 1,000 completions, a tenth of them hostile.

    python benchmarks/code_rewards.py [--pytest 40] [--without-namespaces]

Judges them with two workers, looks for processes, files, keys and shared memory that are left over,
and compares the time per harmless completion with one ``pytest`` process for each (of ``--pytest``
of them, one at a time and two at a time; hostile ones would harm the host). Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from hostile_code import HONEST, HOSTILE, TEST, WRONG

from torchtune_grpo.rewards import CodeReward
from torchtune_grpo.rewards import code as _code
from torchtune_grpo.sandbox import CodeSandbox


def programs(count: int) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Harmless and hostile programs, each different from all others, with the right verdicts."""
    harmless = [(code, True) for code in HONEST.values()] + [(c, False) for c in WRONG.values()]
    hostile = [(code.replace("PORT", "80"), False) for code in HOSTILE.values()]
    few = count // 10
    return (
        [(f"# {i}\n{code}", good) for i, (code, good) in _repeat(harmless, count - few)],
        [(f"# {i}\n{code}", good) for i, (code, good) in _repeat(hostile, few)],
    )


def _repeat(items: list[tuple[str, bool]], count: int) -> list[tuple[int, tuple[str, bool]]]:
    return list(enumerate(islice(cycle(items), count)))


def judge(reward: CodeReward, codes: list[str]) -> list[bool]:
    """Whether each program passes."""
    count = len(codes)
    verdicts = reward.judge(
        [f"```python\n{code}```" for code in codes],
        test=[TEST] * count,
        entry_point=["solve"] * count,
        setup=[""] * count,
    )
    return [not isinstance(v, Exception) and v.passed for v in verdicts]


def processes() -> set[str]:
    """Ids of the machine's processes that belong to this one."""
    mine, found = f" {os.getpid()} ", set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if mine in " ".join(stat.rpartition(")")[2].split()[1:4] + [""]):
                found.add(entry.name)
    return found


def kept_by_the_kernel() -> int:
    """Keys, and SysV shared memory, semaphores and queues, of the whole machine."""
    paths = ["/proc/keys", *(f"/proc/sysvipc/{kind}" for kind in ("shm", "sem", "msg"))]
    return sum(len(Path(path).read_text().splitlines()) for path in paths if os.path.exists(path))


def run_pytest(folder: Path, index: int, code: str) -> float:
    """Seconds of one ``pytest`` process."""
    path = folder / f"test_{index}.py"
    path.write_text(f"{code}\n{TEST}\ndef test_it():\n    check(solve)\n")
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path],
        cwd=folder,
        capture_output=True,
    )
    return time.perf_counter() - start


def pytest_seconds(codes: list[str], *, at_once: int) -> float:
    """Seconds per program with that many ``pytest`` processes side by side."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as threads:
        start = time.perf_counter()
        list(threads.map(lambda item: run_pytest(Path(folder), *item), enumerate(codes)))
        return (time.perf_counter() - start) / len(codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--pytest", type=int, default=40)
    parser.add_argument("--timeout", type=float, default=3.0)
    parser.add_argument("--without-namespaces", action="store_true")
    args = parser.parse_args()
    if args.without_namespaces:
        _code.CodeSandbox = partial(CodeSandbox, namespaces=False)
    harmless, hostile = programs(args.count)
    tempfile.tempdir = tempfile.mkdtemp()  # nobody else's
    before, kept = processes(), kept_by_the_kernel()
    reward = CodeReward(workers=2, timeout=args.timeout)
    judge(reward, ["def solve(n):\n    return 0\n"])  # starts the sandboxes
    wrong = 0
    seconds = []
    for part in (harmless, hostile):
        start = time.perf_counter()
        found = judge(reward, [code for code, _ in part])
        seconds.append(time.perf_counter() - start)
        wrong += sum(a != good for a, (_, good) in zip(found, part, strict=True))
    reward.close()
    time.sleep(1)  # the kernel takes its time to free an ended process's keyring
    result = {
        "completions": args.count,
        "hostile": len(hostile),
        "wrong_verdicts": wrong,
        "leaked_processes": len(processes() - before),
        "leaked_files": len(os.listdir(tempfile.gettempdir())),
        "leaked_keys_and_ipc": kept_by_the_kernel() - kept,
        "seconds": round(sum(seconds), 2),
        "seconds_hostile": round(seconds[1], 2),
        "ms_per_harmless": round(seconds[0] / len(harmless) * 1000, 2),
    }
    codes = [code for code, _ in harmless[: args.pytest]]
    for at_once in (1, 2):
        per_program = pytest_seconds(codes, at_once=at_once)
        result[f"pytest_ms_{at_once}_at_once"] = round(per_program * 1000, 1)
        result[f"faster_than_{at_once}_at_once"] = round(
            per_program * len(harmless) / seconds[0], 1
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
