"""One whole GRPO step, rollout to update, of this package beside TRL's ``GRPOTrainer``.

    python benchmarks/peers/step_trl.py --rounds 3
    python benchmarks/peers/step_trl.py --ways packed trl-8 trl-16 trl-32
    python benchmarks/peers/step_trl.py --ways packed trl-4 --new-tokens 512 --warm-up 0 --repeats 1
    python benchmarks/peers/step_trl.py --shape SmolLM2 --prompt-lengths $(yes 57 | head -16) \
        --new-tokens 12 --rows 128 --ways packed trl-16 trl-64

Ways: ``packed`` is this package with ``--rows`` rows in each forward pass, ``transformers`` is the
same with transformers' modules and ``generate``, and ``trl-<n>`` is TRL with a per-device
micro-batch of n rows. TRL's activation checkpointing, on by default, is off: with it a
step takes longer. Both compute the same: four prompts of 96 to 292 tokens, groups of eight,
full-length responses, the same weights, LoRA r = 8 on all linear layers, the paper's loss with beta
0.04, one AdamW step over all rows, float32. The reward is a function of the sampled ids.

Every way runs in a process of its own, and each of ``--rounds`` takes the ways in turn, so that a
machine that is slow for some minutes slows all of them. Extra memory is a process's peak resident
memory minus what was resident before its first step, the largest of all rounds; time is the median
of all rounds' ``--repeats`` steps after the ``--warm-up`` ones. Prints one JSON line.
"""

import argparse
import ctypes
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torchtune.modules.peft import get_adapter_params, set_trainable_params

from torchtune_grpo.advantages import group_advantages
from torchtune_grpo.config.keys import RolloutConfig, SamplingParams
from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.machine.device import keep_freed_memory
from torchtune_grpo.models import HFCheckpointer, transformers_model
from torchtune_grpo.models.auto import TransformersModel
from torchtune_grpo.models.layers import standardize
from torchtune_grpo.rollout import sample_groups
from torchtune_grpo.rollout.engine import make_engine
from torchtune_grpo.rollout.request import EngineContext
from torchtune_grpo.training.mini_batches import micro_batches
from torchtune_grpo.training.reference import Reference

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import (  # noqa: E402
    GROUP,
    PROMPT_LENGTHS,
    SHAPES,
    Words,
    apart,
    forget_peak,
    lora,
    loss_of,
    memory_mb,
    random_model,
    random_policy,
    random_prompts,
    report,
    trl_settings,
    with_weights,
)
from rollout import to_transformers  # noqa: E402

BETA, LEARNING_RATE, RANK = 0.04, 1e-5, 8


def score(completion_ids, **columns) -> list[float]:
    """A reward that differs within a group and costs nothing."""
    return [float(sum(ids) % 7) for ids in completion_ids]


class Stopwatch:
    """Seconds of each step, and the peak memory of all of them."""

    def __init__(self, *, warm_up: int) -> None:
        self.seconds: list[float] = []
        self._warm_up = warm_up
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what building left behind belongs to no step
        forget_peak()
        self._resident = memory_mb("VmRSS")

    def start(self) -> None:
        self._start = time.perf_counter()

    def stop(self) -> None:
        self.seconds.append(time.perf_counter() - self._start)

    def result(self) -> dict:
        """Return a process's result."""
        return {
            "each": self.seconds[self._warm_up :],
            "extra_mb": round(memory_mb("VmHWM") - self._resident),
        }


def summary(rounds: list[dict]) -> dict:
    """Return a way's numbers for the JSON line, from its results in all rounds."""
    each = [seconds for result in rounds for seconds in result["each"]]
    return {
        "seconds": round(statistics.median(each), 2),
        "each": [round(seconds, 2) for seconds in each],
        "extra_mb": max(result["extra_mb"] for result in rounds),
    }


def run_ours(args: argparse.Namespace, way: str) -> dict:
    """Run the recipe's rollout and update, without logs and metrics."""
    shape = SHAPES[args.shape]
    prompts = random_prompts(args.prompt_lengths, shape["vocab_size"])
    is_packed = way == "packed"
    if is_packed:
        model = random_policy(shape, rank=RANK)
        model.load_state_dict(random_model(shape).state_dict(), strict=False)
    else:
        model = by_transformers(shape)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    engine = make_engine(EngineContext(model, RolloutConfig(), torch.device("cpu")))
    params = SamplingParams(max_generated_tokens=args.new_tokens)
    sampling = {"tokenizer": Words(), "group_size": GROUP, "params": params, "prefill": ""}
    reference, loss = Reference(model), GRPOLoss(kl_coeff=BETA)
    watch = Stopwatch(warm_up=args.warm_up)
    keep_freed_memory()  # as the recipe does; the watch's trim has taken back what was kept
    for step in range(args.warm_up + args.repeats):
        watch.start()
        model.eval()
        batch = sample_groups(engine, prompts, **sampling, seed=0, step=step)
        rewards = torch.tensor(score(batch.completion_ids))
        batch = replace(batch, advantages=group_advantages(rewards, group_size=GROUP))
        parts = micro_batches(batch, group_size=GROUP, pack=is_packed, rows=args.rows)
        batch = replace(batch, ref_logprobs=reference.logprobs(parts, temperature=1.0))
        batch = with_weights(batch)
        model.train()
        for part in parts:
            loss_of(model, part, batch.select(part.rows), loss, temperature=1.0).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        watch.stop()
        assert int(batch.response_mask.sum()) == batch.num_rows * args.new_tokens
    return watch.result()


def by_transformers(shape: dict) -> TransformersModel:
    """Make the same policy of transformers' modules, as for types that the package lacks."""
    with tempfile.TemporaryDirectory() as folder:
        to_transformers(random_model(shape)).save_pretrained(folder)
        model = transformers_model(folder, lora_rank=RANK)
        standardize(model)
        weights = model.kind.read(HFCheckpointer(folder, ""), {})
        model.load_state_dict(weights, strict=False)
    set_trainable_params(model, get_adapter_params(model))
    return model


def word_tokenizer(size: int):
    """Make a transformers tokenizer of words w0, w1, ...; its end token cannot be sampled."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {f"w{i}": i for i in range(size)} | {"end": size}
    words = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token="w0")


def make_trainer(args: argparse.Namespace, way: str, reward, folder: str):
    """Make TRL's trainer on the same weights and prompts, with one optimizer step a batch."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = int(way.removeprefix("trl-"))
    shape = SHAPES[args.shape]
    prompts = random_prompts(args.prompt_lengths, shape["vocab_size"])
    texts = [Words().decode(tokens) for tokens in prompts.tokens]
    return GRPOTrainer(
        model=to_transformers(random_model(shape)),
        reward_funcs=reward,
        args=GRPOConfig(
            **trl_settings(folder),
            max_steps=args.warm_up + args.repeats,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=len(texts) * GROUP // rows,
            num_generations=GROUP,
            max_completion_length=args.new_tokens,
            beta=BETA,
            use_bias_correction_kl=False,
            learning_rate=LEARNING_RATE,
        ),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=word_tokenizer(shape["vocab_size"]),
        peft_config=lora(RANK),
    )


def run_trl(args: argparse.Namespace, way: str) -> dict:
    """Run ``GRPOTrainer.train``, timed from the beginning of each step to its end."""
    from transformers import TrainerCallback

    sampled: list[int] = []

    def reward(completion_ids, **columns) -> list[float]:
        sampled.append(sum(len(ids) for ids in completion_ids))
        return score(completion_ids)

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs) -> None:
            watch.start()

        def on_step_end(self, *args, **kwargs) -> None:
            watch.stop()

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, way, reward, folder)
        trainer.add_callback(Clock())
        watch = Stopwatch(warm_up=args.warm_up)
        trainer.train()
    tokens = len(args.prompt_lengths) * GROUP * args.new_tokens
    assert sampled == [tokens] * (args.warm_up + args.repeats), sampled
    return watch.result()


def run_way(way: str, args: argparse.Namespace) -> dict:
    """Run the steps of a way in this process."""
    torch.set_num_threads(args.threads)
    return (run_trl if way.startswith("trl") else run_ours)(args, way)


def main() -> None:
    """Run every way in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=["packed", "trl-4"])
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--prompt-lengths", type=int, nargs="+", default=PROMPT_LENGTHS)
    parser.add_argument("--rows", type=int, default=GROUP, help="of a forward pass, packed")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    # TRL looks for the model's name on the hub.
    rounds = [
        {way: apart(run_way, way, args, HF_HUB_OFFLINE="1") for way in args.ways}
        for _ in range(args.rounds)
    ]
    results = {way: summary([each[way] for each in rounds]) for way in args.ways}
    report("step_trl", args, results=results)


if __name__ == "__main__":
    main()
