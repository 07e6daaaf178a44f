"""What a GPU does with this package, measured: decoding, the update and real steps.

    python benchmarks/gpu.py                          # all pieces: 10 to 20 minutes on an H100
    python benchmarks/gpu.py --pieces decoding update
    python benchmarks/gpu.py --device cpu --tiny      # whether it runs, in seconds

The model has the shape of Llama 3.2 1B and random weights; nothing is downloaded, and the package
need not be installed, if what it needs is. Each piece runs in a process of its own for at most
eight minutes, so that one that fails, hangs or runs out of memory costs no other:

    decoding      32 to 256 rows, eagerly and as CUDA graphs; transformers' generate beside it
    update        forward and backward of 64 rows, 8 and 32 at a time, with activation checkpointing
                  and without
    recipe_lora, recipe_qlora, recipe_full
                  three steps of the shipped configs, and their memory beside the estimate

Prints each figure's line when it is known, and writes all of a piece to results.json in
`--output-dir`.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from torchtune_grpo.data import PromptBatch  # noqa: E402
from torchtune_grpo.loss import GRPOLoss  # noqa: E402
from torchtune_grpo.monitor.record import read  # noqa: E402
from torchtune_grpo.rollout import roll_out  # noqa: E402
from torchtune_grpo.rollout.engine import NativeEngine  # noqa: E402
from torchtune_grpo.rollout.request import RolloutRequest  # noqa: E402
from torchtune_grpo.training.logprobs import trajectory_logprobs  # noqa: E402
from torchtune_grpo.training.mini_batches import micro_batches  # noqa: E402

GIB = 2**30
torchtune_grpo.__path__.append(str(ROOT))  # for `recipes`, which only an installed package has

MEMORY = ("alloc", "reserved")  # peaks in the metrics of a step
# What the figures are held against.
SHARE_AT_64_ROWS = 0.6  # of the memory bandwidth
TOKENS_A_SECOND_AT_256_ROWS = 12_627  # vLLM 0.10.2 on an A800, this model
LOGPROB_GAP = 0.02  # sampler's and trainer's in bf16, on average


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    shape: dict[str, int]
    dtype: torch.dtype
    copied_bytes: int
    rows: Sequence[int]  # of decoding
    prompt_lengths: Sequence[int]
    new_tokens: int
    groups: int  # of an update
    micro_batches: Sequence[int]  # their rows
    responses: tuple[int, int]  # the shortest and the longest


REAL = Sizes(
    shape=LLAMA_1B,
    dtype=torch.bfloat16,
    copied_bytes=2 * GIB,
    rows=(32, 64, 128, 256),
    prompt_lengths=PROMPT_LENGTHS,
    new_tokens=256,
    groups=8,
    micro_batches=(8, 32),
    responses=(32, 512),
)
TINY = Sizes(
    shape=TINY_SHAPE,
    dtype=torch.float32,
    copied_bytes=2**20,
    rows=(8,),
    prompt_lengths=(5, 9),
    new_tokens=6,
    groups=2,
    micro_batches=(8,),
    responses=(2, 6),
)


class Bench:
    """Measures the entries of one piece, each for itself, and writes them down at once."""

    def __init__(self, device: str, sizes: Sizes, file: Path) -> None:
        self.device, self.sizes, self._file = torch.device(device), sizes, file
        self.is_cuda = self.device.type == "cuda"

    def measure(self, what: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """An entry: the figures that ``work`` returns, or why there are none."""
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
        """How long some work takes, until the device has done it."""
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def last_lines(text: str, count: int = 4) -> str:
    """The end of a traceback, short enough for a line."""
    lines = [line.strip() for line in text.splitlines()]
    return " | ".join([line for line in lines if line.strip("^~ ")][-count:])[-600:]


# --- Decoding -------------------------------------------------------------------------------------


def build(bench: Bench, *, rank: int | None = 32) -> TransformerDecoder:
    """A policy with random weights, whose samples are about as certain as a real one's."""
    sizes = bench.sizes
    model = random_policy(sizes.shape, rank=rank, dtype=sizes.dtype, device=bench.device)
    torch.nn.init.constant_(model.norm.scale, 4.0)
    for name, parameter in model.named_parameters():
        if "lora_b" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.eval()


def prompts_of(bench: Bench, *, rows: int) -> PromptBatch:
    """A step's prompts, of a few lengths."""
    lengths = bench.sizes.prompt_lengths
    lengths = [lengths[i % len(lengths)] for i in range(rows // GROUP)]
    return random_prompts(lengths, bench.sizes.shape["vocab_size"])


def decoding(bench: Bench) -> None:
    """Rollouts; what limits a step is the memory that it reads."""
    rollouts(bench)
    rows = bench.sizes.rows[len(bench.sizes.rows) > 1]
    bench.measure(f"{rows} rows, transformers", lambda: peer(bench, rows=rows))


def rollouts(bench: Bench) -> None:
    """Of one model, whose memory is given back behind them."""
    copy = bench.measure("a copy within the memory", lambda: copy_bandwidth(bench))
    model = build(bench)
    for rows in bench.sizes.rows:
        for way in ("eager", "graphs") if bench.is_cuda else ("eager",):
            work = partial(decode, bench, model, rows=rows, way=way, bandwidth=copy.get("gb_s"))
            bench.measure(f"{rows} rows, {way}", work)
    bench.measure("log-probs of sampler and trainer", lambda: logprob_gap(bench, model))


def copy_bandwidth(bench: Bench) -> dict[str, Any]:
    """Bytes read and written by a copy, a second."""
    source = torch.zeros(bench.sizes.copied_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    best = min(bench.seconds(lambda: target.copy_(source)) for _ in range(10))
    return {"gb_s": round(2 * len(source) / best / 1e9, 1)}


def decode(
    bench: Bench, model: TransformerDecoder, *, rows: int, way: str, bandwidth: float | None
) -> dict[str, Any]:
    """Tokens a second of three rollouts, and what a step takes."""
    settings = RolloutConfig(cuda_graphs="auto" if way == "graphs" else "never")
    engine, longest = NativeEngine(model, settings), bench.sizes.new_tokens
    prompts = prompts_of(bench, rows=rows)

    def generate(new_tokens: int) -> None:
        engine.generate(request_of(prompts, new_tokens=new_tokens))

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
        read = bytes_a_step(model, request_of(prompts, new_tokens=longest))
        figures["share_of_bandwidth"] = round(read / step / bandwidth / 1e9, 3)
    if way == "eager":
        figures["kernels"] = kernels_a_step(bench, generate)
    if rows == 64:
        figures |= target("share_of_bandwidth", figures, at_least=SHARE_AT_64_ROWS)
    if rows == 256:
        figures |= target("tokens_s", figures, at_least=TOKENS_A_SECOND_AT_256_ROWS)
    return figures


def target(name: str, figures: dict[str, Any], **bound: float) -> dict[str, Any]:
    """What a figure is held against, and whether it is met."""
    ((kind, value),) = bound.items()
    met = figures[name] >= value if kind == "at_least" else figures[name] <= value
    return {"target": f"{name} {kind.replace('_', ' ')} {value}", "met": bool(met)}


def bytes_a_step(model: TransformerDecoder, request: RolloutRequest) -> float:
    """What an ideal step reads: all weights, and the keys and values of each prompt and row once.

    Of a step in the middle of the rollout; the embedding, which is the output as well, counts once.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    attn = model.layers[0].attn
    a_token = 2 * len(model.layers) * attn.num_kv_heads * attn.head_dim
    a_token *= model.tok_embeddings.weight.element_size()
    tokens = sum(map(len, request.prompts))
    tokens += request.num_rows * request.params.max_generated_tokens / 2
    return weights + a_token * tokens


def kernels_a_step(bench: Bench, generate: Callable[[int], Any]) -> float:
    """Kernels of a decoding step, or, without a GPU, operations that are no views."""
    few, more = 2, 6  # a profile of many steps takes minutes to read
    counts = [kernels(bench, partial(generate, tokens)) for tokens in (few, more)]
    return (counts[1] - counts[0]) / (more - few)


def kernels(bench: Bench, work: Callable[[], Any]) -> int:
    """How many kernels some work launches."""
    if not bench.is_cuda:
        return counted(work).count
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in on_device)


def logprob_gap(bench: Bench, model: TransformerDecoder) -> dict[str, Any]:
    """How far the sampler's log-probs are from those that the trainer computes of its tokens."""
    rows = roll_out(
        NativeEngine(model, RolloutConfig(cuda_graphs="never")),
        prompts_of(bench, rows=bench.sizes.rows[0]),
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


def peer(bench: Bench, *, rows: int) -> dict[str, Any]:
    """transformers' generate with a model of the same shape."""
    model, new_tokens = build(bench, rank=None), bench.sizes.new_tokens
    request = request_of(prompts_of(bench, rows=rows), new_tokens=new_tokens)
    way = make_way("transformers", model, request)
    with torch.no_grad():
        best = min(bench.seconds(way) for _ in range(2))
    return {"tokens_s": round(rows * new_tokens / best)}


# --- The update -----------------------------------------------------------------------------------


def update(bench: Bench) -> None:
    """Forward and backward of a step's rows, as many at a time as a config says."""
    for checkpointing in (True, False):
        for rows in bench.sizes.micro_batches:
            name = "with" if checkpointing else "without"
            bench.measure(
                f"{rows} rows at a time, {name} activation checkpointing",
                partial(update_pass, bench, rows=rows, checkpointing=checkpointing),
            )


def update_pass(bench: Bench, *, rows: int, checkpointing: bool) -> dict[str, Any]:
    """The first pass, whose shapes are new, and the second."""
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


def recipe(bench: Bench, *, config: str) -> None:
    """Three steps of a shipped config, whose weights and data are made on the spot."""
    bench.measure(config, partial(three_steps, bench, config))


def three_steps(bench: Bench, config: str) -> dict[str, Any]:
    """Runs the recipe in this process, as torchrun would, and reads what it wrote."""
    path = ROOT / "recipes" / "configs" / f"{config}.yaml"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = make_inputs(bench, folder, config)
        sys.argv = ["grpo_full_finetune.py", "--config", str(path), *overrides]
        try:
            runpy.run_path(str(ROOT / "recipes" / "grpo_full_finetune.py"), run_name="__main__")
        except SystemExit as end:
            if end.code:
                said = last_lines(Path(sys.stderr.name).read_text())
                raise RuntimeError(f"the recipe ended with {end.code}: {said}") from None
        steps = read(folder / "out", "step")
        cfg = load_config(str(path), overrides)
        memory = torch.cuda.get_device_properties(0).total_memory / GIB if bench.is_cuda else None
        estimated = estimate(cfg, card=memory, device=bench.device.type)["peak"]
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
    """Overrides of a shipped config: its checkpoint and data, made in a folder, and three steps."""
    common = ["num_steps=3", "eval_dataset=null", "evaluation.every_n_steps=null"]
    common += ["saving.every_n_steps=null", f"device={bench.device.type}"]
    if bench.sizes is TINY:
        from runs import tiny_overrides  # needs more packages than the real sizes do

        return [*tiny_overrides(config, folder), *common, "dtype=fp32"]
    checkpoint, rows = folder / "checkpoint", folder / "rows.jsonl"
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
    """Random weights at Llama 3.2 1B's shape, and a tokenizer of bytes."""
    to_transformers(random_model(LLAMA_1B, dtype=torch.bfloat16)).save_pretrained(folder)
    lines = (base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
    (folder / "tokenizer.model").write_bytes(b"".join(lines))


# --- Running --------------------------------------------------------------------------------------

RUN = {
    "decoding": decoding,
    "update": update,
    "recipe_lora": partial(recipe, config="llama3_2_1B_lora_grpo"),
    "recipe_qlora": partial(recipe, config="llama3_2_1B_qlora_grpo"),
    "recipe_full": partial(recipe, config="llama3_2_1B_full_grpo"),
}


def run_piece(name: str, device: str, tiny: bool, entries: Path, log: Path) -> None:
    """One piece, in a process of its own."""
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for descriptor in (1, 2):  # of what libraries write
        os.dup2(sys.stdout.fileno(), descriptor)
    bench = Bench(device, TINY if tiny else REAL, entries)
    bench.measure("setting up", lambda: card(bench))
    RUN[name](bench)


def card(bench: Bench) -> dict[str, Any]:
    """What was measured on."""
    if not bench.is_cuda:
        return {"card": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(bench.device)
    return {"card": properties.name, "memory_gib": round(properties.total_memory / GIB, 1)}


def measure_piece(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Starts a piece and waits for its end, whatever that is."""
    entries, log = (args.output_dir / f"{name}.{kind}" for kind in ("jsonl", "log"))
    entries.write_text("")
    # A forked process cannot use a GPU that its parent knows of; it starts faster, for tests.
    context = multiprocessing.get_context("fork" if args.device == "cpu" else "spawn")
    start = time.perf_counter()
    process = context.Process(target=run_piece, args=(name, args.device, args.tiny, entries, log))
    process.start()
    process.join(args.seconds)
    result: dict[str, Any] = {}
    if process.is_alive():
        process.kill()
        process.join()
        result["error"] = f"ended after {args.seconds} s"
    elif process.exitcode:
        result["error"] = f"exit code {process.exitcode}: {last_lines(log.read_text())}"
    result["seconds"] = round(time.perf_counter() - start, 1)
    result["entries"] = [json.loads(line) for line in entries.read_text().splitlines()]
    return result


def commit() -> str:
    """That of the repository, if this is one."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Measures piece after piece, and writes down what there is behind each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pieces", nargs="+", choices=RUN, default=list(RUN))
    parser.add_argument("--output-dir", type=Path, default=Path("gpu_check"))
    parser.add_argument("--device", default="cuda", help="cpu shows whether the script runs")
    parser.add_argument("--tiny", action="store_true", help="a shape that a CPU runs in seconds")
    parser.add_argument("--seconds", type=float, default=480, help="most seconds of a piece")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch {torch.__version__} finds no GPU here")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "benchmark": "gpu",
        "date": time.strftime("%Y-%m-%d"),
        "torch": f"torch {torch.__version__}",
        "commit": commit(),
        "pieces": {},
    }
    for name in args.pieces:
        piece = result["pieces"][name] = measure_piece(name, args)
        (args.output_dir / "results.json").write_text(json.dumps(result, indent=2) + "\n")
        for entry in piece["entries"]:
            print(json.dumps(entry))
        failed = [entry["what"] for entry in piece["entries"] if "error" in entry]
        failed += [piece["error"]] if "error" in piece else []
        said = f"failed: {', '.join(failed)}" if failed else "done"
        print(f"{name}: {said}, {piece['seconds']} s", flush=True)
    print(f"Wrote {args.output_dir / 'results.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
