"""What the plugin costs every `import torch`, torchtune or not. Prints one JSON line.

`hook_ms` times loading and calling our entry point behind `import torch`, each time in a fresh
process; it is the number to keep below 20. `import_torch_ms` is the whole import with and without
the hook; the difference also holds torch's own search for entry points, and the noise of a much
longer measurement.

    python benchmarks/import_hook.py [RUNS]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

HOOK = """
import time, torch
start = time.perf_counter()
from torchtune_grpo.cli.tune import autoload
autoload()
print(1e3 * (time.perf_counter() - start))
"""

IMPORT = """
import time
start = time.perf_counter()
import torch
print(1e3 * (time.perf_counter() - start))
"""


def milliseconds(code: str, *, autoload: bool) -> float:
    """What `code` prints, run by a fresh interpreter with torch's autoload on or off."""
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout)


def main(runs: int) -> None:
    """Measure in turns, so that a slow moment of the machine hits all three alike."""
    hook, with_hook, without_hook = [], [], []
    for _ in range(runs + 1):
        hook.append(milliseconds(HOOK, autoload=False))
        with_hook.append(milliseconds(IMPORT, autoload=True))
        without_hook.append(milliseconds(IMPORT, autoload=False))
    # The first round fills the file cache.
    result = {
        "benchmark": "import_hook",
        "runs": runs,
        "hook_ms": round(statistics.median(hook[1:]), 2),
        "import_torch_ms": {
            "with_hook": round(statistics.median(with_hook[1:])),
            "without_hook": round(statistics.median(without_hook[1:])),
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
