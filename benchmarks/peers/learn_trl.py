"""A config's run with TRL's ``GRPOTrainer``: the same folder, prompts, reward and batch.

    python benchmarks/peers/learn_trl.py --steps 8 16 --seeds 0 1 2 grpo_samples=4
    python benchmarks/learning.py grpo_samples=4 num_steps=16 evaluation.every_n_steps=8

    PYTHONPATH=benchmarks/real python benchmarks/peers/learn_trl.py --steps 2 --seeds 0 \
        --config benchmarks/real/gsm8k.yaml --rows 8

Both train LoRA of rank 32 and alpha 64 on all linear layers with a constant rate and no KL term, on
one thread, with the first reward of the config. A stop string of one token becomes TRL's end of a
text; at others TRL cannot stop, and the reward does not see what follows. TRL's adapters are merged
and scored by ``torchtune-grpo evaluate``, on the same held-out questions. Prints one JSON line: per
seed the scores after the given steps, and the CPU seconds of the process until then, imports
included.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import BIN, apart, lora, report, run, trl_settings  # noqa: E402

from torchtune_grpo.config.check import instantiate, read_config  # noqa: E402
from torchtune_grpo.config.command_line import load_config  # noqa: E402
from torchtune_grpo.data import RLDataset  # noqa: E402
from torchtune_grpo.rewards.reward import make_reward  # noqa: E402


def train(seed: int, args: argparse.Namespace, folder: str) -> dict[int, float]:
    """Return this process's CPU seconds after each number of steps; save adapters in the folder."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    cfg = read_config(load_config(args.config, [f"seed={seed}", *args.overrides]))
    own_tokenizer = instantiate("tokenizer", cfg.tokenizer)
    data: RLDataset = instantiate("dataset", cfg.dataset, own_tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model_dir)
    rows = [data[i] for i in range(len(data))]
    prompts = [tokenizer.decode(row["tokens"]) for row in rows]
    assert tokenizer(prompts).input_ids == [list(row["tokens"]) for row in rows]
    ends = {end: tokenizer(end).input_ids for end in cfg.sampling.stop_strings}
    for (token,) in (tokens for tokens in ends.values() if len(tokens) == 1):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(token)
    reward = make_reward(cfg.rewards[0], "rewards.0").function

    def first_reward(prompts, completions, **columns) -> list[float]:
        for end in ends:
            completions = [text.partition(end)[0] + end * (end in text) for text in completions]
        return reward(prompts, [data.prefill + text for text in completions], **columns)

    seconds: dict[int, float] = {}

    class Clock(TrainerCallback):
        def on_step_end(self, options, state, control, **more) -> None:
            if state.global_step in args.steps:
                seconds[state.global_step] = round(time.process_time(), 1)
                trainer.save_model(f"{folder}/{state.global_step}")

    trainer = GRPOTrainer(
        model=cfg.model_dir,
        reward_funcs=first_reward,
        args=GRPOConfig(
            **trl_settings(folder),
            model_init_kwargs={"dtype": {"bf16": "bfloat16"}.get(cfg.dtype, "float32")},
            seed=seed,
            max_steps=max(args.steps),
            per_device_train_batch_size=args.rows,
            gradient_accumulation_steps=cfg.batch_size * cfg.grpo_samples // args.rows,
            num_generations=cfg.grpo_samples,
            temperature=cfg.temperature,
            max_completion_length=cfg.max_generated_tokens,
            beta=0.0,
            learning_rate=cfg.optimizer.lr,
            lr_scheduler_type="constant",
            weight_decay=0.0,
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": prompts} | {n: [r["columns"][n] for r in rows] for n in rows[0]["columns"]}
        ),
        processing_class=tokenizer,
        peft_config=lora(32),
        callbacks=[Clock()],
    )
    trainer.train()
    return seconds


def score(adapter: Path, args: argparse.Namespace) -> dict[str, float]:
    """Return an adapter's held-out pass@1, if measured, and its accuracy with its interval."""
    from peft import AutoPeftModelForCausalLM, PeftConfig
    from transformers import AutoTokenizer

    output, merged = adapter / "evaluation.json", adapter / "merged"
    AutoPeftModelForCausalLM.from_pretrained(adapter).merge_and_unload().save_pretrained(merged)
    base = PeftConfig.from_pretrained(adapter).base_model_name_or_path
    AutoTokenizer.from_pretrained(base).save_pretrained(merged)
    keys = [*args.overrides, f"model_dir={merged}", f"eval_dataset.num_samples={args.questions}"]
    which = [args.config, "--base", *keys]
    run([BIN / "torchtune-grpo", "evaluate", *which, "--output", output])
    graders = json.loads(output.read_text())["groups"]["all"]["graders"]
    found = next(iter(graders.values()))["before"]
    names = [f"eval/{n}" for n in ("pass@1", "accuracy", "accuracy/low", "accuracy/high")]
    return {n: round(found[n], 3) for n in names if n in found}


def learn(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return a seed's scores and CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = apart(train, seed, args, folder, HF_HUB_OFFLINE="1")
        scores = {n: score(Path(folder, str(n)), args) for n in args.steps}
    return {"seed": seed, "after steps": scores, "CPU seconds": seconds}


def main() -> None:
    """Train with each seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--questions", type=int, default=48, help="that are held out")
    parser.add_argument("--rows", type=int, default=16, help="of TRL's micro-batches")
    parser.add_argument("--config", default="smollm2_135M_grpo")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to it")
    args = parser.parse_intermixed_args()
    report("learn_trl", args, runs=[learn(seed, args) for seed in args.seeds])


if __name__ == "__main__":
    main()
