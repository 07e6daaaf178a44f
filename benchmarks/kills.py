"""Is anything lost when a run is killed at any time, and resumed?

    python benchmarks/kills.py --minutes 10

Trains the tiny model, fully and with adapters in turn, saving after every step. A run is killed
(-9) again and again: at a random time, or while a checkpoint is being written. It is resumed, or
started again while it has no checkpoint, until it ends. Then weights, optimizer, generators,
metrics and completions are compared with those of a run that was never killed, bit by bit.

Prints one JSON line. `lost` counts the resumes that did not begin at the newest checkpoint that was
there after the kill. A start that fails ends the benchmark.
"""

import argparse
import contextlib
import os
import random
import re
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchtune.models  # noqa: F401  # what a run imports, once for all
import torchtune.training  # noqa: F401
from common import report
from torch.utils._pytree import keystr, tree_flatten_with_path

import torchtune_grpo.rollout  # noqa: F401
from torchtune_grpo.config.command_line import config_files, recipes_folder
from torchtune_grpo.monitor.record import COMPLETIONS_FILE, read, read_lines

SETTINGS = """
num_steps=6 saving.every_n_steps=1 saving.keep_last=2 batch_size=2 temperature=2
grpo_samples=4 forward_batch_size=8 max_generated_tokens=12 eval_dataset=null
evaluation.every_n_steps=null optimizer.lr=1e-3 dataset.num_samples=64 log_groups=99
""".split()
SETTINGS.append("rewards=[{_component_: kills.reward_length}]")  # groups differ, weights move
LORA = ["model=torchtune_grpo.models.lora_hf_model", "model.lora_dropout=0.5"]
MODELS = {"full": [], "lora": LORA}
TIMED = re.compile("time/|^step_time$|tokens_per_second$")


def reward_length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Return rewards that differ within a group."""
    return [float(len(completion) % 7) for completion in completions]


def start(output: Path, *overrides: str) -> int:
    """Start a run in a forked process, which already has its imports; return its id."""
    base = f"model_dir={output.parent / 'tiny_llama'}"
    config = str(config_files()["tiny_arithmetic_grpo"])
    if (child := os.fork()) > 0:
        return child
    try:
        log = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        script = str(recipes_folder() / "grpo_full_finetune.py")
        sys.argv = [script, "--config", config, f"output_dir={output}", *SETTINGS, base]
        sys.argv += overrides
        with contextlib.suppress(SystemExit):
            runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def newest(output: Path) -> int:
    """Return the step of the newest checkpoint; 0 without one."""
    return max((int(path.name[5:]) for path in output.glob("step_*")), default=0)


def kill_or_end(child: int, output: Path, *, seconds: float, saving: bool) -> bool:
    """Kill a run after some seconds, or at its next save after them; False if it ended before."""
    due = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, Path(f"{output}.log").read_text()[-3000:]
            return False
        now = time.monotonic()
        if now >= due and (not saving or any(output.glob(".incomplete/*"))):
            time.sleep(random.uniform(0, 0.02) if saving else 0)  # a save takes about as long
            os.kill(child, signal.SIGKILL)
            return os.WIFSIGNALED(os.waitpid(child, 0)[1])
        time.sleep(0.001)


def outcome(output: Path) -> dict[str, Any]:
    """Return all that a run leaves, except times."""
    folder = output / f"step_{newest(output):06d}"
    state = torch.load(folder / "training_state.pt", weights_only=False)  # a sampler's arrays, too
    assert read(output, "step")[-1]["grad_norm"] > 0
    return {
        "weights": [path.read_bytes() for path in sorted(folder.glob("model*.safetensors"))],
        "state": leaves(state),
        "events": [
            {name: value for name, value in event.items() if not TIMED.search(name)}
            for event in read(output, "step", "evaluation")
        ],
        "completions": read_lines(output / COMPLETIONS_FILE),
    }


def leaves(state: Any) -> dict[str, Any]:
    """Return every value of a nested state by its place; tensors and arrays as their bits."""
    return {
        keystr(path): (value.dtype, value.shape, np.asarray(value).tobytes())
        if hasattr(value, "dtype")
        else value
        for path, value in tree_flatten_with_path(state)[0]
    }


def killed_run(output: Path, model: list[str], *, kills: int, seconds: float) -> dict[str, int]:
    """Do one run, killed at most ``kills`` times; ``seconds`` is what it takes without kills."""
    counts = dict.fromkeys(("kills", "while_saving", "resumes", "lost"), 0)
    while True:
        step = newest(output)
        child = start(output, *model, f"resume_from_checkpoint={step > 0}")
        saving = random.random() < 0.5
        wait = random.uniform(0, 0.7 * seconds) if counts["kills"] < kills else 1e9
        killed = kill_or_end(child, output, seconds=wait / 2 if saving else wait, saving=saving)
        if step:
            counts["resumes"] += 1
            found = re.search(r"Resumed after step (\d+)", Path(f"{output}.log").read_text())
            counts["lost"] += found is not None and int(found[1]) != step
        if not killed:
            return counts
        counts["kills"] += 1
        counts["while_saving"] += any(output.glob(".incomplete/*"))


def main() -> None:
    """Kill, resume and compare until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=8, help="at most, of one run")
    parser.add_argument("--seed", type=int, default=0, help="of the times of the kills")
    args = parser.parse_args()
    random.seed(args.seed)
    begin = time.monotonic()
    names = ("runs", "bit_equal", "kills", "while_saving", "resumes", "lost")
    totals, differing = dict.fromkeys(names, 0), []
    with tempfile.TemporaryDirectory() as work:
        whole = {}
        while not totals["runs"] or time.monotonic() - begin < 60 * args.minutes:
            name = list(MODELS)[totals["runs"] % len(MODELS)]
            if name not in whole:
                since = time.monotonic()
                output = Path(work, f"whole_{name}")
                kill_or_end(start(output, *MODELS[name]), output, seconds=1e9, saving=False)
                whole[name] = outcome(output), time.monotonic() - since
            expected, seconds = whole[name]
            output = Path(work, f"killed_{totals['runs']}")
            counts = killed_run(output, MODELS[name], kills=args.kills, seconds=seconds)
            result = outcome(output)
            gaps = [what for what in expected if result[what] != expected[what]]
            differing += [f"run {totals['runs']}: {what}" for what in gaps]
            counts |= {"runs": 1, "bit_equal": not gaps}
            totals = {key: totals[key] + counts[key] for key in totals}
    report("kills", args, results=totals, differing=differing)


if __name__ == "__main__":
    main()
