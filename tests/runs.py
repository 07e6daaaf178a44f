"""Run the real ``tune`` command on shipped configs, with only model, checkpoint and data tiny."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tiny_llama
import torch
from checkpoints import TINY, llama_checkpoint, qwen_checkpoint
from fork_server import TIMEOUT, environment, fork_server
from hf_models import hf_folder
from hf_tokenizers import write_tokenizer
from processes import children
from safetensors.torch import load_file
from torch.distributed import TCPStore
from transformers import AutoTokenizer

from torchtune_grpo.config.command_line import config_files, recipes_folder
from torchtune_grpo.monitor.record import read, read_lines
from torchtune_grpo.monitor.record import read_metrics as metrics

TUNE = Path(sys.executable).parent / "tune"
RECIPE, DISTRIBUTED = "grpo_full_finetune_single_device", "grpo_full_finetune_distributed"
# torchao compiles its optimizers, which takes longer than a test's run.
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
NO_EVALUATION = ["eval_dataset=null", "evaluation.every_n_steps=null"]
SGD = ["dtype=fp32", "optimizer=torch.optim.SGD", "optimizer.lr=0.5", "lr_scheduler=null"]
# A user's own file; nearly every group's rewards differ, so that weights move.
LENGTH_REWARD = """
def reward_length(prompts, completions, **columns):
    return [float(len(c) % 7) for c in completions]
"""
OF_LENGTH = "rewards=[{_component_: my_rewards.reward_length}]"


@dataclass
class Result:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def run(
    *arguments: object, cwd: Path, check: bool = True, fresh: bool = False, **env: str
) -> Result:
    """Run ``python ARGUMENTS``, a path, or ``-m`` and a module, in a process of its own.

    Args:
        check: fail unless it ends well.
        fresh: a new interpreter, not one forked from the server; needed where an import reads
            what ``env`` says.
    """
    command = [*map(str, arguments)]
    if fresh or _needs_gpu(command):
        result = run_python(*command, cwd=cwd, **env)
    else:
        (done,) = fork_server().run(*command, cwd=cwd, envs=[environment(**env)])
        result = Result(*done)
    assert not check or result.code == 0, result.out[-2000:] + result.err[-4000:]
    return result


def tune(*arguments: object, cwd: Path, **settings: Any) -> Result:
    """Run ``tune ARGUMENTS``; settings are those of ``run``."""
    return run(TUNE, *arguments, cwd=cwd, **settings)


def run_ranks(
    *arguments: object,
    ranks: int,
    machines: int = 1,
    cwd: Path,
    check: bool = True,
    recipe: Path | None = None,
    command: str | None = None,
    **env: str,
) -> list[Result]:
    """Run the recipe, a copy of it, or one of our commands in forked processes, as torchrun does.

    ``--config`` and the name of a shipped config, or a path, come first.
    """
    first, name, *rest = map(str, arguments)
    assert first == "--config"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent
    of_machine = ranks // machines
    common = environment(
        **env,
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(of_machine),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    file = str(recipe or recipes_folder() / "grpo_full_finetune.py")
    config = str(config_files().get(name, name))
    script = [file, "--config", config, *rest]
    if command:
        script = ["-m", "torchtune_grpo", command, config, *rest]
    numbers = [(str(rank), str(rank % of_machine)) for rank in range(ranks)]
    envs = [{**common, "RANK": rank, "LOCAL_RANK": local} for rank, local in numbers]
    if _needs_gpu(script):
        with ThreadPoolExecutor(ranks) as pool:
            done = list(pool.map(lambda env: run_python(*script, cwd=cwd, **env), envs))
    else:
        done = [Result(*each) for each in fork_server().run(*script, cwd=cwd, envs=envs)]
    said = "".join(each.out[-1000:] + each.err[-3000:] for each in done)
    assert not check or all(each.code == 0 for each in done), said
    return done


def _needs_gpu(command: list[str]) -> bool:
    """Return whether a command needs a GPU, which torchtune's import denies to forked processes."""
    return "device=cuda" in command and torch.cuda.is_available()


@contextmanager
def in_background(function: Callable, *arguments: object, **settings: Any) -> Iterator[Future]:
    """Call a function, such as ``tune``, while others may run.

    Yields the Future of what it returns, whose ``processes()`` are those that have been started.
    What still runs when the block is left, is killed.
    """
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(fork_server).result().pid
        done = pool.submit(function, *arguments, **settings)
        done.processes = lambda: list(children(of=server))
        try:
            yield done
        finally:
            for process in done.processes():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def run_python(*arguments: str, cwd: Path, python: str = sys.executable, **env: str) -> Result:
    """Run ``python ARGUMENTS`` in a new interpreter."""
    done = subprocess.run(
        [python, *arguments],
        cwd=cwd,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def random_tiny_llama(folder: Path) -> None:
    """Put the tiny model with random weights into ``folder/tiny_llama``; it is made only once."""
    shutil.copytree(Path(_made().name) / "tiny_llama", folder / "tiny_llama")


@cache
def _made() -> TemporaryDirectory:
    folder = TemporaryDirectory()
    run(tiny_llama.__file__, "tiny_llama", "--steps", 0, cwd=Path(folder.name))
    return folder


def copy_recipe(config: str, folder: Path, *, recipe: str = RECIPE) -> None:
    """Copy the recipe and a config with ``tune cp``, to ``my_grpo.py`` and ``my_config.yaml``."""
    tune("cp", recipe, "my_grpo.py", cwd=folder)
    tune("cp", config, "my_config.yaml", cwd=folder)


def gsm8k(n: int) -> dict:
    """Make a row in GSM8K's format, with its number in columns of a user's own."""
    answer = f"{n} + 2 = <<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}"
    return {"question": f"{n} plus 2?", "answer": answer, "number": n, "weight": n}


def humaneval(n: int) -> dict:
    """Make a row in HumanEval's format."""
    return {
        "task_id": f"Test/{n}",
        "prompt": f'def add(x):\n    """Adds {n} to x."""\n',
        "entry_point": "add",
        "canonical_solution": f"    return x + {n}\n",
        "test": f"def check(candidate):\n    assert candidate(2) == {n + 2}\n",
    }


ROWS = 12
# Weights that NF4 takes have a multiple of 16,384 elements.
QUANTIZABLE = {"hidden_size": 512, "intermediate_size": 128}
# Config -> the model and the tokenizer of its folder.
FROM_FOLDER = {
    "hf_lora_grpo": ("qwen3", "qwen3"),
    "hf_qlora_grpo": ("gemma3", "gemma3"),
    "hf_full_grpo": ("qwen2", "deepseek_r1_distill"),
    "qwen3_0_6B_lora_grpo": ("qwen3", "qwen3"),
    "qwen3_1_7B_lora_grpo": ("qwen3", "qwen3"),
    "qwen3_4B_qlora_grpo": ("qwen3", "qwen3"),
    "smollm2_1_7B_lora_grpo": ("llama2", "smollm2"),
    "llama3_1_8B_qlora_grpo": ("llama3", "llama3_2"),
}


def tiny_overrides(config: str, folder: Path) -> list[str]:
    """Make a tiny model and data; return overrides with which a shipped config runs in seconds."""
    overrides: dict[str, Any] = {
        "output_dir": folder / "out",
        "device": "cpu",
        "num_steps": 2,
        "batch_size": 2,
        "grpo_samples": 4,
        "max_generated_tokens": 12,
        "loss.kl_coeff": 0.04,  # trains a random model, which is never right
    }
    code = "code" in config
    data, row = folder / "rows.jsonl", humaneval if code else gsm8k
    data.write_text("".join(json.dumps(row(n)) + "\n" for n in range(ROWS)))
    for node in ("dataset", "eval_dataset"):
        overrides |= {
            f"{node}.source": "json",
            f"{node}.data_files": data,
            f"{node}.system_prompt": "null",
        }
        if code:
            overrides[f"{node}.split"] = "test"  # a dozen rows are too few for slices
            overrides["rewards.0.workers"] = 1
    of_model = _tiny_folder if config in FROM_FOLDER else _tiny_builder
    return [f"{key}={value}" for key, value in (of_model(config, folder) | overrides).items()]


def _tiny_folder(config: str, folder: Path) -> dict[str, Any]:
    """Make a model's folder as the hub has it."""
    model, tokenizer = FROM_FOLDER[config]
    model_dir = folder / "model"
    shape = QUANTIZABLE if "qlora" in config else {}
    if not model_dir.exists():
        eos = AutoTokenizer.from_pretrained(write_tokenizer(model_dir, tokenizer)).eos_token_id
        hf_folder(model, model_dir, vocab_size=384, eos_token_id=eos, **shape)
        ends = {"eos_token_id": [eos, 0]}  # more than config.json has, as the hub's folders
        (model_dir / "generation_config.json").write_text(json.dumps(ends))
    return {"model_dir": model_dir}


def _tiny_builder(config: str, folder: Path) -> dict[str, Any]:
    """Make a checkpoint for one of torchtune's builders."""
    qwen = config.startswith("qwen")
    checkpoint = folder / ("qwen" if qwen else "llama")
    if not checkpoint.exists():
        (qwen_checkpoint if qwen else llama_checkpoint)(checkpoint)
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
    return overrides | {
        "checkpointer.checkpoint_dir": checkpoint,
        "checkpointer.checkpoint_files": "[model.safetensors]",
    }


def run_tiny(config: str, folder: Path, *more: str, **settings: Any) -> Result:
    """Run a shipped config made tiny; later overrides win."""
    overrides = tiny_overrides(config, folder)
    return tune("run", RECIPE, "--config", config, *overrides, *more, cwd=folder, **settings)


def untimed(folder: Path) -> list[dict]:
    """Read the metrics, without those that depend on how fast the machine is."""
    timed = ("time", "per_second")
    return [{k: v for k, v in r.items() if not any(w in k for w in timed)} for r in metrics(folder)]


def prompts(folder: Path, *kinds: str) -> list[dict]:
    """Read what the record says of each prompt, by step and evaluation."""
    return [event.get("prompts") for event in read(folder, *(kinds or ("step", "evaluation")))]


def completions(folder: Path) -> list[dict]:
    """Read the groups of completions that were logged."""
    return read_lines(folder / "completions.jsonl")


def steps_of(folder: Path) -> list[dict]:
    """Read the metrics of training steps, without those of evaluations."""
    return [record for record in metrics(folder) if "reward" in record]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a checkpoint or a base model's folder."""
    return load_file(next(folder.glob("model*.safetensors")))


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint's adapter in PEFT's form; empty if there is none."""
    file = folder / "adapter" / "adapter_model.safetensors"
    return load_file(file) if file.exists() else {}


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two checkpoints' weights."""
    assert left.keys() == right.keys()
    return max((left[name].float() - right[name].float()).abs().max().item() for name in left)
