"""Tokens per second of group sampling: the native engine beside the other ways, in one run.

    python benchmarks/rollout.py                                   # shape S, float32
    python benchmarks/rollout.py --dtype bf16
    python benchmarks/rollout.py --shape M --dtype bf16 --prompts 1 --prompt-length 16 \
        --new-tokens 9 --ways native stock --repeats 1
    python benchmarks/rollout.py --shape SmolLM2 --prompts 16 --prompt-length 57 --new-tokens 12
    python benchmarks/rollout.py --ways native turns tool slow_tool    # responses of several turns
    python benchmarks/rollout.py --ways turns slow_tool --reply-steps 64

S is a Llama 3.2 of 42M parameters (dim 512, 8 layers, 8/4 heads, FFN 1536, V 32,768), M is Llama
3.2 1B, SmolLM2 is the 135M model; weights are random. Ways: `native` is this package's
engine, `stock` is torchtune's own `generate`, `transformers` is its `generate` with the
same weights. `turns`, `tool` and `slow_tool` are the native engine with turns of 32 tokens in the
mean, and replies of 16 that count as tokens and come at once, or after 0.1 or 2 seconds: a rollout
takes about as long as `slowest_chain`, the most seconds that one response waits for its replies,
and not `all_chains`, the sum over all. A reply is due after `--reply-steps` (0: null). Each way
runs in a process of its own, because the recipes change how the C library allocates memory: once to
warm up, then `--repeats` times; the line holds medians. Prints one JSON line.
"""

import argparse
import statistics
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from common import (
    PROMPT_LENGTHS,
    SHAPES,
    apart,
    random_model,
    random_prompts,
    report,
    request_of,
)
from torchtune.generation import generate as stock_generate
from torchtune.models.convert_weights import tune_to_hf
from torchtune.modules import TransformerDecoder

from torchtune_grpo.config.keys import RolloutConfig
from torchtune_grpo.machine.device import keep_freed_memory
from torchtune_grpo.rollout.engine import make_engine
from torchtune_grpo.rollout.request import EngineContext, RolloutRequest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOOLS = {"turns": 0.0, "tool": 0.1, "slow_tool": 2.0}  # seconds
# These allocate as the recipes do, the others as their users do.
OURS = ("native", *TOOLS)
WAYS = (*OURS, "stock", "transformers")
TURN, REPLY = 32, 16  # tokens


class Tool:
    """Replies some seconds after a turn's end, until a response has ``limit`` tokens."""

    def __init__(self, seconds: float, *, limit: int) -> None:
        self._seconds, self._limit = seconds, limit
        self._due: list[tuple[float, int, list[int]]] = []  # in the order of time
        self.calls: Counter[int] = Counter()  # by row

    def end_turn(self, row: int, response: Sequence[int], *, sampled: int) -> None:
        """Take a call."""
        self.calls[row] += 1
        reply = [1] * min(REPLY, self._limit - len(response) - 1)
        self._due.append((time.perf_counter() + self._seconds, row, reply))

    def replies(self, *, wait: bool) -> dict[int, list[int]]:
        """Return the replies that are due."""
        if wait:
            time.sleep(min(0.05, max(0.0, self._due[0][0] - time.perf_counter())))
        count = bisect_right(self._due, time.perf_counter(), key=lambda each: each[0])
        due, self._due = self._due[:count], self._due[count:]
        return {row: reply for _, row, reply in due}

    def waited(self) -> dict[str, float]:
        """Return the seconds that calls took since the last time."""
        calls, self.calls = self.calls.values(), Counter()
        chains = {"slowest_chain": max(calls), "all_chains": sum(calls)}
        return {name: calls * self._seconds for name, calls in chains.items()}


def make_way(
    name: str, model: TransformerDecoder, request: RolloutRequest, *, reply_steps: int | None = None
) -> Callable[[], int]:
    """Make a function that rolls out once and returns the number of tokens of all responses."""
    if name in OURS:
        given = {} if reply_steps is None else {"reply_steps": reply_steps or None}
        kind = {"_component_": "native", **given} if name in TOOLS else name
        device = model.tok_embeddings.weight.device
        engine = make_engine(EngineContext(model, RolloutConfig(engine=kind), device))
        return lambda: int(engine.generate(request).lengths.sum())
    device, new_tokens = model.tok_embeddings.weight.device, request.params.max_generated_tokens
    prompts = [prompt for prompt in request.prompts for _ in range(request.group_size)]
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    if name == "stock":
        return partial(generate_with_torchtune, model, padded, new_tokens=new_tokens)
    starts = torch.tensor([width - len(p) for p in prompts], device=device)
    inputs = {
        "input_ids": padded,
        "attention_mask": torch.arange(width, device=device) >= starts[:, None],
        "max_new_tokens": new_tokens,
        "do_sample": True,
        "top_k": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    peer = partial(to_transformers(model).generate, **inputs)
    return lambda: len(padded) * (peer().shape[1] - width)


def generate_with_torchtune(
    model: TransformerDecoder, padded: torch.Tensor, *, new_tokens: int
) -> int:
    """Run torchtune's own function, and count the tokens."""
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
    """Return a transformers Llama with the same weights."""
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


def time_way(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Time one way in this process: the first run separately, and the median of the others."""
    if name in OURS:
        keep_freed_memory()
    model = random_model(SHAPES[args.shape], dtype=DTYPES[args.dtype])
    model = model.eval().requires_grad_(False)
    lengths = [args.prompt_length or PROMPT_LENGTHS[i % 4] for i in range(args.prompts)]
    prompts = random_prompts(lengths, model.tok_embeddings.num_embeddings)
    request = request_of(prompts, new_tokens=args.new_tokens, group=args.group_size)
    tool = None
    if name in TOOLS:
        tool = Tool(TOOLS[name], limit=args.new_tokens)
        stops = range(0, model.tok_embeddings.num_embeddings, TURN)
        request = replace(request, stop_tokens=stops, turns=tool)
    way, waited = make_way(name, model, request, reply_steps=args.reply_steps), {}
    seconds = []
    for _ in range(args.repeats + 1):
        start = time.perf_counter()
        tokens = way()
        seconds.append(time.perf_counter() - start)
        waited = tool.waited() if tool else {}
    middle = statistics.median(seconds[1:])
    return {
        "tokens": tokens,
        "seconds": round(middle, 3),
        "tokens_per_second": round(tokens / middle, 1),
        **waited,
    }


def main() -> None:
    """Time every way, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--prompts", type=int, default=4, help="of 96 to 292 tokens in turn")
    parser.add_argument("--prompt-length", type=int, help="one length for all prompts")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["native", "stock"])
    parser.add_argument("--reply-steps", type=int, help="0: null")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    ways = {name: apart(time_way, name, args) for name in args.ways}
    speeds = {name: way["tokens_per_second"] for name, way in ways.items()}
    ratios = {name: round(speeds[args.ways[0]] / speed, 2) for name, speed in speeds.items()}
    report("rollout", args, ways=ways, ratios=ratios, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
