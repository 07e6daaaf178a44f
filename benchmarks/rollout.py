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
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

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
WAYS = (*OURS, "stock", "transformers")
PROMPT_LENGTHS = (96, 160, 212, 292)


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


def make_way(
    name: str, model: TransformerDecoder, prompts: PromptBatch, args, *, new_tokens: int
) -> Callable[[], int]:
    """A function that rolls out once and returns the number of tokens sampled."""
    group, settings = args.group_size, RolloutConfig(max_rows=args.max_rows)
    request = RolloutRequest(
        prompts=prompts.tokens,
        group_size=group,
        params=SamplingParams(max_generated_tokens=new_tokens),
        stop_tokens=[],
        keys=row_keys(seed=0, step=0, prompt_indices=prompts.indices, group_size=group),
    )
    if name in ("native", "kept") and args.varying_lengths:
        planned = roll_out_planned if name == "native" else roll_out_kept
        rows = args.max_rows or request.num_rows
        return partial(planned, NativeEngine(model, settings), request, max_rows=rows)
    if name in OURS:
        engine = (TorchtuneEngine if name == "torchtune" else NativeEngine)(model, settings)
        return lambda: int(engine.generate(request).lengths.sum())
    device = next(model.parameters()).device
    lengths = torch.tensor([len(prompt) for prompt in prompts.tokens], device=device)
    width = int(lengths.max())
    padded = torch.tensor([[0] * (width - len(p)) + p for p in prompts.tokens], device=device)
    padded = padded.repeat_interleave(group, dim=0)
    if name == "stock":
        return partial(generate_with_torchtune, model, padded, new_tokens=new_tokens)
    mask = torch.arange(width, device=device) >= (width - lengths)[:, None]
    options = {"max_new_tokens": new_tokens, "do_sample": True, "top_k": 0}
    options |= {"eos_token_id": None, "pad_token_id": 0}
    inputs = {"input_ids": padded, "attention_mask": mask.repeat_interleave(group, dim=0)}
    peer = partial(to_transformers(model).generate, **inputs, **options)
    return lambda: len(padded) * (peer().shape[1] - width)


class PlannedEnd:
    """Ends a response at 20 to ``longest`` tokens, as its first token decides."""

    def __init__(self, longest: int) -> None:
        self._longest = self.window = longest

    def end(self, tokens: list[int], *, start: int) -> int | None:
        """See ``StopStrings.end``."""
        length = 20 + tokens[0] * 7919 % (self._longest - 19)
        return length if start < length <= len(tokens) else None


def roll_out_planned(engine: NativeEngine, request: RolloutRequest, *, max_rows: int) -> int:
    """Rolls out with planned ends, and counts the tokens."""
    with torch.no_grad(), engine.current_weights() as (decoder, cache):
        rollout = GroupRollout(decoder, cache, engine._buffers, request, max_rows=max_rows)
        rollout.transcript._stop_strings = PlannedEnd(request.params.max_generated_tokens)
        return int(rollout.run(lambda: False).lengths.sum())


def roll_out_kept(engine: NativeEngine, request: RolloutRequest, *, max_rows: int) -> int:
    """As many groups at a time as fit, each to its end; counts the tokens up to planned ends."""
    plan, tokens = PlannedEnd(request.params.max_generated_tokens), 0
    keys = request.keys.view(-1, request.group_size)
    for part in torch.arange(len(keys)).split(max_rows // request.group_size):
        prompts = [request.prompts[i] for i in part]
        samples = engine.generate(replace(request, prompts=prompts, keys=keys[part].flatten()))
        tokens += sum(plan.end(row, start=0) for row in samples.responses.tolist())
    return tokens


def generate_with_torchtune(
    model: TransformerDecoder, padded: torch.Tensor, *, new_tokens: int
) -> int:
    """torchtune's own function; counts the tokens."""
    (rows, width), dtype = padded.shape, next(model.parameters()).dtype
    model.setup_caches(batch_size=rows, dtype=dtype, decoder_max_seq_len=width + new_tokens)
    try:
        tokens, _ = stock_generate(model, padded, max_generated_tokens=new_tokens, pad_id=0)
    finally:
        for layer in model.layers:
            layer.attn.kv_cache = None
            layer.attn.cache_enabled = False
        model.decoder_max_cache_seq_len = None
    return rows * (tokens.shape[1] - width)


def to_transformers(model: TransformerDecoder):
    """The same weights in a transformers Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    attn, mlp = model.layers[0].attn, model.layers[0].mlp
    config = LlamaConfig(
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
    state = tune_to_hf(
        model.state_dict(), attn.num_heads, attn.num_kv_heads, attn.embed_dim, attn.head_dim
    )
    peer = LlamaForCausalLM(config)
    missing, unexpected = peer.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return peer.to(model.tok_embeddings.weight).eval()


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


def time_way(name: str, args: argparse.Namespace) -> dict[str, float]:
    """One way in this process: the first run apart, and the median of the others."""
    if name in OURS:
        keep_freed_memory()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    model = build_model(args.shape, dtype).to(device)
    lengths = [args.prompt_length or PROMPT_LENGTHS[i % 4] for i in range(args.prompts)]
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


def main() -> None:
    """Times every way, one after the other."""
    dtypes = {"fp32": "float32", "bf16": "bfloat16"}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=("S", "M"), default="S")
    parser.add_argument("--dtype", choices=dtypes, default="fp32")
    parser.add_argument("--prompts", type=int, default=4, help="of 96 to 292 tokens in turn")
    parser.add_argument("--prompt-length", type=int, help="one length for all prompts")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--max-rows", type=int, help="of this package's engines")
    parser.add_argument("--varying-lengths", action="store_true")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["native", "torchtune", "stock"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.dtype = dtypes[args.dtype]
    ways = {}
    for name in args.ways:
        apart = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=apart) as process:
            ways[name] = process.submit(time_way, name, args).result()
        print(name, ways[name], file=sys.stderr, flush=True)
    speed = {name: way["tokens_per_second"] for name, way in ways.items()}
    first, *others = args.ways
    result = {
        "benchmark": "rollout",
        "settings": vars(args),
        "ways": ways,
        "ratios": {f"{first}/{name}": round(speed[first] / speed[name], 2) for name in others},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
