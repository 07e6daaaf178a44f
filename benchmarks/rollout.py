"""Tokens per second of group sampling: the native engine beside the other ways, in one run.

    python benchmarks/rollout.py                                   # shape S, float32
    python benchmarks/rollout.py --dtype bf16
    python benchmarks/rollout.py --shape M --dtype bf16 --prompts 1 --prompt-length 16 \
        --new-tokens 9 --ways native stock --repeats 1
    python benchmarks/rollout.py --varying-lengths --ways native kept
    python benchmarks/rollout.py --varying-lengths --ways native kept --prompts 32 --max-rows 32

S is a Llama 3.2 of 42M parameters (dim 512, 8 layers, 8/4 heads, FFN 1536, V 32,768), M is Llama
3.2 1B; weights are random. Ways: `native` and `torchtune` are this package's engines, `stock` is
torchtune's own `generate`, `transformers` is its `generate` with the same weights, `kept` is the
native engine with ended rows kept until the last one ends; with `--max-rows` it works on that many
at a time, batch after batch. Each way runs in a process of its own, because the recipes change how
the C library allocates memory: once to warm up, then `--repeats` times; the line holds medians. A
decoding step's time is that of all tokens less that of one, which takes the prompts' computation
and what copies weights out of it. `--varying-lengths` ends each response at 20 to `--new-tokens`
tokens (a function of its first token). Prints one JSON line.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torchtune.generation import generate as stock_generate
from torchtune.models.convert_weights import tune_to_hf
from torchtune.models.llama3_2 import llama3_2, llama3_2_1b
from torchtune.modules import TransformerDecoder

from torchtune_grpo.data import PromptBatch
from torchtune_grpo.machine.device import keep_freed_memory
from torchtune_grpo.rollout import (
    NativeEngine,
    RolloutConfig,
    RolloutRequest,
    SamplingParams,
    TorchtuneEngine,
    row_keys,
)
from torchtune_grpo.rollout.batch import GroupRollout

SHAPE_S = dict(
    vocab_size=32_768,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    embed_dim=512,
    intermediate_dim=1536,
    max_seq_len=4096,
)
OURS = ("native", "torchtune", "kept")  # allocate as the recipes do; the others as their users do
PROMPT_LENGTHS = (96, 160, 212, 292)


class PlannedEnd:
    """Ends a response at 20 to ``longest`` tokens, as its first token decides."""

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def end(self, tokens: list[int], *, start: int) -> int | None:
        """See ``StopStrings.end``."""
        length = 20 + tokens[0] * 7919 % (self._longest - 19)
        return length if start < length <= len(tokens) else None


def build_model(shape: str, dtype: torch.dtype) -> TransformerDecoder:
    """The policy, with random weights."""
    torch.manual_seed(0)
    model = (llama3_2(**SHAPE_S) if shape == "S" else llama3_2_1b()).to(dtype).eval()
    torch.nn.init.normal_(model.tok_embeddings.weight, std=0.02)
    return model.requires_grad_(False)


def build_prompts(lengths: list[int], vocab: int) -> PromptBatch:
    """Random prompts."""
    generator = torch.Generator().manual_seed(1)
    return PromptBatch(
        tokens=[torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths],
        indices=list(range(len(lengths))),
        prompts=[""] * len(lengths),
        columns={},
        uses=[0] * len(lengths),
        places=[*range(len(lengths))],
    )


def roll_out_planned(engine: NativeEngine, request: RolloutRequest, *, max_rows: int) -> int:
    """Rolls out with planned ends, and counts the tokens."""
    with torch.no_grad(), engine.current_weights() as (decoder, cache):
        rollout = GroupRollout(decoder, cache, engine._buffers, request, max_rows=max_rows)
        rollout.transcript._stop_strings = PlannedEnd(request.params.max_generated_tokens)
        samples = rollout.run(lambda: False)
    return int(samples.lengths.sum())


def roll_out_kept(engine: NativeEngine, request: RolloutRequest, *, max_rows: int) -> int:
    """As many groups at a time as fit, each to its end; counts the tokens up to planned ends."""
    plan = PlannedEnd(request.params.max_generated_tokens)
    keys = request.keys.view(-1, request.group_size)
    at_once = max_rows // request.group_size
    tokens = 0
    for start in range(0, len(keys), at_once):
        part = slice(start, start + at_once)
        samples = engine.generate(
            replace(request, prompts=request.prompts[part], keys=keys[part].flatten())
        )
        tokens += sum(plan.end(row, start=0) for row in samples.responses.tolist())
    return tokens


def make_way(name: str, model: TransformerDecoder, prompts: PromptBatch, args, *, new_tokens: int):
    """A function that rolls out once and returns the number of tokens sampled."""
    group = args.group_size
    request = RolloutRequest(
        prompts=prompts.tokens,
        group_size=group,
        params=SamplingParams(max_generated_tokens=new_tokens),
        stop_tokens=[],
        keys=row_keys(seed=0, step=0, prompt_indices=prompts.indices, group_size=group),
    )
    rows, settings = request.num_rows, RolloutConfig(max_rows=args.max_rows)
    if name == "torchtune":
        engine = TorchtuneEngine(model, settings)
        return lambda: int(engine.generate(request).lengths.sum())
    if name in ("native", "kept"):
        engine = NativeEngine(model, settings)
        if not args.varying_lengths:
            return lambda: int(engine.generate(request).lengths.sum())
        planned = roll_out_planned if name == "native" else roll_out_kept
        return lambda: planned(engine, request, max_rows=args.max_rows or rows)
    device = next(model.parameters()).device
    lengths = torch.tensor([len(prompt) for prompt in prompts.tokens], device=device)
    width = int(lengths.max())
    padded = torch.tensor([[0] * (width - len(p)) + p for p in prompts.tokens], device=device)
    padded = padded.repeat_interleave(group, dim=0)
    if name == "stock":

        def stock() -> int:
            model.setup_caches(
                batch_size=rows,
                dtype=next(model.parameters()).dtype,
                decoder_max_seq_len=width + new_tokens,
            )
            try:
                tokens, _ = stock_generate(model, padded, max_generated_tokens=new_tokens, pad_id=0)
            finally:
                for layer in model.layers:
                    layer.attn.kv_cache = None
                    layer.attn.cache_enabled = False
                model.decoder_max_cache_seq_len = None
            return rows * (tokens.shape[1] - width)

        return stock
    if name == "transformers":
        peer = to_transformers(model)
        mask = torch.arange(width, device=device) >= (width - lengths)[:, None]
        inputs = {"input_ids": padded, "attention_mask": mask.repeat_interleave(group, dim=0)}
        options = {"max_new_tokens": new_tokens, "do_sample": True, "top_k": 0}

        def peer_generate() -> int:
            tokens = peer.generate(**inputs, **options, eos_token_id=None, pad_token_id=0)
            return rows * (tokens.shape[1] - width)

        return peer_generate
    raise SystemExit(f"--ways {name}: give native, torchtune, stock, transformers or kept")


def to_transformers(model: TransformerDecoder):
    """The same weights in a transformers Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    attn, mlp = model.layers[0].attn, model.layers[0].mlp
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.tok_embeddings.num_embeddings,
            hidden_size=attn.embed_dim,
            num_hidden_layers=len(model.layers),
            num_attention_heads=attn.num_heads,
            num_key_value_heads=attn.num_kv_heads,
            intermediate_size=mlp.w1.weight.shape[0],
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=True,
            eos_token_id=None,  # by default a word of the vocabulary
        )
    )
    state = tune_to_hf(
        model.state_dict(),
        num_heads=attn.num_heads,
        num_kv_heads=attn.num_kv_heads,
        dim=attn.embed_dim,
        head_dim=attn.head_dim,
    )
    missing, unexpected = peer.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return peer.to(model.tok_embeddings.weight).eval()


def time_way(name: str, args: argparse.Namespace) -> dict[str, float]:
    """One way in this process: the first run apart, and the median of the others."""
    if name in OURS:
        keep_freed_memory()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    model = build_model(args.shape, dtype).to(device)
    lengths = [PROMPT_LENGTHS[i % 4] for i in range(args.prompts)]
    if args.prompt_length:
        lengths = [args.prompt_length] * args.prompts
    prompts = build_prompts(lengths, model.tok_embeddings.num_embeddings)
    way = make_way(name, model, prompts, args, new_tokens=args.new_tokens)
    tokens, warm_up, seconds = timed(way, device, repeats=args.repeats)
    result = {
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "warm_up_seconds": round(warm_up, 2),
    }
    if not args.varying_lengths:
        way = make_way(name, model, prompts, args, new_tokens=1)
        _, _, first = timed(way, device, repeats=args.repeats)
        result["ms_per_decode_step"] = round(1000 * (seconds - first) / (args.new_tokens - 1), 1)
    return result


def timed(
    way: Callable[[], int], device: torch.device, *, repeats: int
) -> tuple[int, float, float]:
    """Tokens sampled, seconds of the first run, and the median of ``repeats`` more."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        tokens = way()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return tokens, seconds[0], statistics.median(seconds[1:])


def run_apart(way: str, **environment: str) -> dict:
    """What this script prints for one way, in a process of its own."""
    done = subprocess.run(
        [sys.executable, *sys.argv, "--in-this-process", "--ways", way],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    result = json.loads(done.stdout.splitlines()[-1])
    print(way, result, file=sys.stderr, flush=True)
    return result


def main() -> None:
    """Times every way, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=("S", "M"), default="S")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--prompts", type=int, default=4, help="of 96, 160, 212, 292 tokens in turn"
    )
    parser.add_argument("--prompt-length", type=int, help="one length for all prompts")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--max-rows", type=int, help="of the native engine")
    parser.add_argument("--varying-lengths", action="store_true")
    parser.add_argument("--ways", nargs="+", default=["native", "torchtune", "stock"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_this_process:
        (name,) = args.ways
        return print(json.dumps(time_way(name, args)))
    ways = {name: run_apart(name) for name in args.ways}
    first, *others = args.ways
    speed = {name: ways[name]["tokens_per_second"] for name in ways}
    settings = {name: value for name, value in vars(args).items() if name != "in_this_process"}
    result = {
        "benchmark": "rollout",
        "settings": settings,
        "ways": ways,
        "ratios": {f"{first}/{name}": round(speed[first] / speed[name], 2) for name in others},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
