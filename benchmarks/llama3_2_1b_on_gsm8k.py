"""Runs the shipped `llama3_2_1B_lora_grpo` at the true 1B shape for two steps on the CPU.

    python benchmarks/llama3_2_1b_on_gsm8k.py --gsm8k train.jsonl --work-dir /tmp/llama1b

Without a download the weights are random, written in Hugging Face's format (2.5 GB), and the
tokenizer is one of bytes with Llama 3's special tokens, so the text is longer than in reality and
the samples are noise. What it shows is that config, checkpoint, data and memory hold at full size.
Prints one JSON line.
"""

import argparse
import base64
import json
import time
from pathlib import Path

import torch
from common import LLAMA_1B, random_model, report, tune_run
from safetensors.torch import save_file
from torchtune.models.convert_weights import tune_to_hf

from torchtune_grpo.monitor.record import read

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}


def write_checkpoint(folder: Path) -> None:
    """Random weights at Llama 3.2 1B's shape, and a byte tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    model = random_model(LLAMA_1B, dtype=torch.bfloat16)
    state = tune_to_hf(model.state_dict(), num_heads=32, num_kv_heads=8, dim=2048, head_dim=64)
    save_file(
        {name: value.contiguous() for name, value in state.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    lines = (base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
    (folder / "tokenizer.model").write_bytes(b"".join(lines))


def main() -> None:
    """Makes the checkpoint if it is missing, runs two steps, prints what they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--work-dir", type=Path, required=True, help="folder for 5 GB of weights")
    parser.add_argument("--config", default="llama3_2_1B_lora_grpo")
    args = parser.parse_args()
    checkpoint, output = args.work_dir / "checkpoint", args.work_dir / "output"
    if not checkpoint.exists():
        write_checkpoint(checkpoint)
    keys = {
        "checkpointer.checkpoint_dir": checkpoint,
        "tokenizer.path": checkpoint / "tokenizer.model",
        "device": "cpu",
        "dtype": "fp32",  # few CPUs multiply bf16 fast
        "dataset.source": "json",
        "dataset.data_files": args.gsm8k.resolve(),
        "dataset.num_samples": 64,
        "dataset.system_prompt": "null",
        "dataset.max_prompt_tokens": 250,
        "eval_dataset": "null",
        "evaluation.every_n_steps": "null",
        "num_steps": 2,
        "batch_size": 1,
        "grpo_samples": 2,
        "forward_batch_size": 2,
        "max_generated_tokens": 16,
    }
    start = time.perf_counter()
    usage = tune_run(args.config, output, [f"{key}={value}" for key, value in keys.items()])
    names = ("time/rollout", "time/logprobs", "time/update", "step_time")
    report(
        "llama3_2_1b_on_gsm8k",
        {"config": args.config, **keys},
        seconds=round(time.perf_counter() - start, 1),
        peak_memory_gib=usage.ru_maxrss / 2**20,
        steps=[{name: round(step[name], 2) for name in names} for step in read(output, "step")],
    )


if __name__ == "__main__":
    main()
