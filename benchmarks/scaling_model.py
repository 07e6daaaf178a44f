"""A model on paper: the time of a step against ranks and model size. Nothing is measured.

    python benchmarks/scaling_model.py

Every rank works on 4 prompts of 200 tokens with 8 responses of 512, in bf16, on a GPU with 3.35
TB/s of memory bandwidth (60% reached), 989 TFLOP/s (40% reached), and links of 400 GB/s within a
node of 8 and 50 GB/s per GPU between nodes. Parts follow each other; nothing overlaps.

    rollout    512 steps that each read the weights once and the keys and values so far
    reference  2 FLOP per parameter and token; update 6, or 4 where only adapters are trained
    replicated one all-reduce of the gradients: 2 (n-1)/n of their bytes
    sharded    (n-1)/n of the weights' bytes: once for the rollout, once per reference pass, and
               three times per update pass (two gathers, one scatter), with 4 passes a step

A rank's share of the work does not change with the number of ranks: more ranks mean larger steps.
Prints one JSON line, seconds a step.
"""

import json

BANDWIDTH, FLOPS = 0.6 * 3.35e12, 0.4 * 989e12
NODE, NODE_LINK, LINK = 8, 400e9, 50e9
PROMPTS, GROUP, PROMPT, RESPONSE, PASSES = 4, 8, 200, 512, 4
# parameters, layers, key-value width, adapter parameters
MODELS = {
    "1B": (1.24e9, 16, 512, 23e6),
    "8B": (8.0e9, 32, 1024, 84e6),
    "70B": (70.6e9, 80, 1024, 414e6),
}


def step_seconds(model: str, *, ranks: int, trained: str) -> dict[str, float]:
    """Seconds of the parts of a step; ``trained`` is "lora" (replicated) or "full" (sharded)."""
    parameters, layers, kv_width, adapters = MODELS[model]
    link = NODE_LINK if ranks <= NODE else LINK
    rows = PROMPTS * GROUP
    cached = 2 * 2 * layers * kv_width * (PROMPTS * PROMPT + rows * RESPONSE / 2)
    tokens = PROMPTS * PROMPT + rows * RESPONSE  # prompts once per group
    share = (ranks - 1) / ranks
    if trained == "lora":
        wire = 2 * share * 2 * adapters / link
    else:
        wire = share * 2 * parameters * (1 + PASSES + 3 * PASSES) / link
    parts = {
        "rollout": RESPONSE * (2 * parameters + cached) / BANDWIDTH,
        "reference": 2 * parameters * tokens / FLOPS,
        "update": (4 if trained == "lora" else 6) * parameters * tokens / FLOPS,
        "wire": wire,
    }
    return {
        name: round(value, 2) for name, value in (parts | {"step": sum(parts.values())}).items()
    }


def main() -> None:
    """Prints all cases."""
    table = {
        f"{model} {trained} on {ranks}": step_seconds(model, ranks=ranks, trained=trained)
        for model in MODELS
        for trained in ("lora", "full")
        for ranks in (1, 8, 64, 512)
    }
    print(json.dumps({"benchmark": "scaling_model", "seconds": table}))


if __name__ == "__main__":
    main()
