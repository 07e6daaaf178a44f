"""Runs the real ``tune`` command on shipped configs, with only model, checkpoint and data tiny."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from checkpoints import TINY, llama_checkpoint, qwen_checkpoint

TUNE = Path(sys.executable).parent / "tune"
RECIPE = "grpo_full_finetune_single_device"

# Runs scripts (the one of `tune`, say) and modules, one per command, each as its own __main__.
DRIVER = """
import contextlib, io, json, runpy, sys, traceback

results = []
for program, *arguments in json.loads(sys.argv[1]):
    sys.argv = [program, *arguments]
    run = runpy.run_path if "/" in program else runpy.run_module
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run(program, run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
        except Exception:
            code = 1
            traceback.print_exc()
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def tune(*args: str, cwd: Path, check: bool = True, **env: str) -> subprocess.CompletedProcess:
    """``tune ARGS`` in a process of its own, one thread; stdout and stderr come together."""
    done = subprocess.run(
        [str(TUNE), *map(str, args)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert not check or done.returncode == 0, done.stdout[-4000:]
    return done


@dataclass
class Result:
    """How one command ended."""

    code: int
    out: str
    err: str


def run_python(
    *arguments: str, cwd: Path, python: str = sys.executable, **environment: str
) -> Result:
    """``python ARGUMENTS`` in a process of its own."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(
        [python, *arguments],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def drive(
    commands: list[list[str]], cwd: Path, *, check: bool = True, **environment: str
) -> list[Result]:
    """Runs commands one after the other in one process: starting ``tune`` takes seconds."""
    result = run_python("-c", DRIVER, json.dumps(commands), cwd=cwd, **environment)
    assert result.code == 0, result.err
    results = [Result(*each) for each in json.loads(result.out.splitlines()[-1])]
    assert not check or all(each.code == 0 for each in results), results
    return results


def copy_recipe(config: str, folder: Path) -> None:
    """``tune cp`` of the recipe and a config, to ``my_grpo.py`` and ``my_config.yaml``."""
    copy = [str(TUNE), "cp"]
    drive([[*copy, RECIPE, "my_grpo.py"], [*copy, config, "my_config.yaml"]], cwd=folder)


def write_gsm8k(path: Path, rows: int = 12) -> Path:
    """Rows in GSM8K's format."""
    with path.open("w") as file:
        for n in range(rows):
            answer = f"{n} + 2 = <<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}"
            file.write(json.dumps({"question": f"{n} plus 2?", "answer": answer}) + "\n")
    return path


def write_humaneval(path: Path, rows: int = 12) -> Path:
    """Rows in HumanEval's format."""
    with path.open("w") as file:
        for n in range(rows):
            row = {
                "task_id": f"Test/{n}",
                "prompt": f'def add(x):\n    """Adds {n} to x."""\n',
                "entry_point": "add",
                "canonical_solution": f"    return x + {n}\n",
                "test": f"def check(candidate):\n    assert candidate(2) == {n + 2}\n",
            }
            file.write(json.dumps(row) + "\n")
    return path


def tiny_overrides(config: str, folder: Path) -> list[str]:
    """Command-line overrides that make a shipped config run in seconds on a CPU."""
    qwen = config.startswith("qwen")
    checkpoint = folder / ("qwen" if qwen else "llama")
    if not checkpoint.exists():
        (qwen_checkpoint if qwen else llama_checkpoint)(checkpoint)
    code = "code" in config
    data = (write_humaneval if code else write_gsm8k)(folder / "rows.jsonl")
    lora = "full" not in config
    builder = "torchtune.models." + ("qwen2." if qwen else "llama3_2.")
    model = {"_component_": builder + ("lora_" if lora else "") + ("qwen2" if qwen else "llama3_2")}
    model |= TINY
    if qwen:
        model |= {"rope_base": 1000000.0, "tie_word_embeddings": True}
    if "qlora" in config:
        model["quantize_base"] = True
    overrides = {f"model.{key}": value for key, value in model.items()}
    tokenizer = {"path": checkpoint / ("vocab.json" if qwen else "tokenizer.model")}
    tokenizer["special_tokens_path"] = checkpoint / "special_tokens.json"
    if qwen:
        tokenizer["merges_file"] = checkpoint / "merges.txt"
    overrides |= {f"tokenizer.{key}": value for key, value in tokenizer.items()}
    for node in ("dataset", "eval_dataset"):
        overrides |= {
            f"{node}.source": "json",
            f"{node}.data_files": data,
            f"{node}.system_prompt": "null",
        }
        if code:
            overrides[f"{node}.split"] = "test"  # a dozen rows are too few for slices
    overrides |= {
        "checkpointer.checkpoint_dir": checkpoint,
        "checkpointer.checkpoint_files": "[model.safetensors]",
        "output_dir": folder / "out",
        "device": "cpu",
        "num_steps": 2,
        "max_generated_tokens": 12,
    }
    return [f"{key}={value}" for key, value in overrides.items()]


def run_tiny(config: str, folder: Path, *more: str, check: bool = True, **env: str):
    """``tune run`` of a shipped config made tiny; later overrides win.

    torchao compiles its optimizers, which takes longer than the run; ``compiled="1"`` lets it.
    """
    if env.pop("compiled", None) is None:
        env["TORCHDYNAMO_DISABLE"] = "1"
    overrides = tiny_overrides(config, folder)
    return tune(
        "run", RECIPE, "--config", config, *overrides, *more, cwd=folder, check=check, **env
    )


def metrics(folder: Path) -> list[dict]:
    """The run's ``metrics.jsonl``."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
