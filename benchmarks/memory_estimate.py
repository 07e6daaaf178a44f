"""Estimates a config's GPU memory from its shapes.

    python benchmarks/memory_estimate.py recipes/configs/llama3_2_1B_lora_grpo.yaml
    python benchmarks/memory_estimate.py recipes/configs/hf_lora_grpo.yaml model_dir=/tmp/Qwen3-1.7B

A model's shape is read from the config.json in `model_dir`; without such a folder, a few models are
known by its name. Nothing is measured. The model is made on the meta device and its parts are
counted:

    weights      parameters x bytes of dtype; NF4 base weights 0.52 bytes a parameter
    training     trained parameters x (gradient + two Adam moments; 8-bit moments 1 byte each)
    reference    full fine-tuning with kl_coeff > 0: a second copy of the weights
    rollout      keys and values: rows x (prompt + response) x layers x 2 x kv width x bytes, as in
                 evaluation, where no two rows share a prompt
    update       layer inputs kept by activation checkpointing: rows x tokens x layers x D x bytes;
                 one layer's own activations while it is recomputed; three chunks of logits

Rollout and update do not happen at once, so the larger counts. Prints one JSON line, in GiB.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from omegaconf import OmegaConf
from torchtune import config

from torchtune_grpo.logprobs._blocked import default_chunk_bytes

GIB = 2**30
# Of each model's public config.json, what its size depends on.
KEYS = (
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim vocab_size tie_word_embeddings max_position_embeddings"
).split()
KNOWN = {
    "Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, 40960),
    "Qwen3-1.7B": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True, 40960),
    "Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True, 40960),
    "SmolLM2-1.7B-Instruct": ("llama", 2048, 8192, 24, 32, 32, 64, 49152, True, 8192),
    "Llama-3.1-8B-Instruct": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False, 131072),
}


def estimate(cfg) -> dict[str, float]:
    """GiB by part for a config with activation checkpointing."""
    size = 2 if cfg.dtype == "bf16" else 4
    quantized = "qlora" in cfg.model._component_ or cfg.model.get("quantize_base", False)
    node = OmegaConf.create({**cfg.model})
    node._component_ = node._component_.replace("qlora_", "lora_")
    with torch.device("meta"):
        model = config.instantiate(node)
    named = dict(model.named_parameters())
    adapters = {name for name in named if "lora_" in name or "magnitude" in name}
    base = sum(p.numel() for name, p in named.items() if name not in adapters)
    linear = sum(
        p.numel()
        for name, p in named.items()
        if name not in adapters and p.dim() == 2 and name.startswith("layers")
    )
    trained = sum(named[name].numel() for name in adapters) or base
    moments = 2 if "8bit" in cfg.optimizer._component_ else 2 * size
    layer = model.layers[0]
    kv_width = layer.attn.num_kv_heads * layer.attn.head_dim
    dim = model.tok_embeddings.embedding_dim
    hidden = layer.mlp.w1.weight.shape[0]
    depth = len(model.layers)
    tokens = cfg.dataset.max_prompt_tokens + cfg.max_generated_tokens
    rows = cfg.batch_size * cfg.grpo_samples
    live = cfg.get("rollout", {}).get("max_rows") or rows
    micro = (cfg.forward_batch_size or rows) * tokens
    weights = (base - linear) * size + linear * (0.52 if quantized else size)
    parts = {
        "weights": weights + (trained * size if adapters else 0),
        "training": trained * (size + moments),
        "reference": base * size if not adapters and cfg.loss.kl_coeff > 0 else 0,
        "rollout": live * tokens * 2 * kv_width * size * depth,
        "update": micro * dim * size * depth
        + micro * (8 * dim + 4 * hidden) * size
        + 3 * default_chunk_bytes(torch.device("cuda"), tokens=micro),
    }
    parts = {name: value / GIB for name, value in parts.items()}
    fixed = parts["weights"] + parts["training"] + parts["reference"]
    return parts | {"peak": fixed + max(parts["rollout"], parts["update"])}


def main() -> None:
    """Prints the estimate of one config."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to it")
    args = parser.parse_args()
    cfg = OmegaConf.load(args.config)
    cfg.merge_with_dotlist(args.overrides)
    with TemporaryDirectory() as folder:
        name = Path(cfg.get("model_dir") or "").name
        if name in KNOWN and not Path(cfg.model_dir).is_dir():
            shape = dict(zip(KEYS, KNOWN[name], strict=True))
            Path(folder, "config.json").write_text(json.dumps(shape))
            cfg.model_dir = folder
        parts = estimate(cfg)
    result = {"benchmark": "memory_estimate", "config": args.config.stem}
    print(json.dumps(result | {name: round(value, 2) for name, value in parts.items()}))


if __name__ == "__main__":
    main()
