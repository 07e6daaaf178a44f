"""The tiny model's warm-up: supervised, until it can reason but mostly does not.

It learns to work problems out step by step and, towards the end, to guess in most cases. A sampled
answer is then right only where the model happened to work it out, and reinforcement learning finds
out that working it out pays.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtune.modules import TransformerDecoder

from torchtune_grpo.data import arithmetic_dataset
from torchtune_grpo.machine.device import keep_freed_memory, limit_threads
from torchtune_grpo.monitor.progress import make_bar

Example = tuple[list[int], list[int]]  # tokens of a prompt, tokens of its completion
Pair = tuple[Example, Example]  # a problem worked out, and guessed

NUM_PROBLEMS, BATCH_SIZE = 8000, 16
# Found by trial.
LR, LR_STEPS_UP = 2e-3, 50
GUESSES, GUESSES_FROM = 0.8, 0.75  # their share at the end; the part of the steps they start after
LEVEL_RATIO = 2  # how often a level comes against the one before: it holds more facts, rarer ones


def warm_up(
    model: TransformerDecoder, tokenizer: Any, *, seed: int, levels: Sequence[int], steps: int
) -> None:
    """Train a model with random weights in place; the seed is that of problems and their order."""
    if steps == 0:
        return
    keep_freed_memory()
    limit_threads(model)
    by_level = _examples(tokenizer, levels, seed)
    shares = [LEVEL_RATIO**place for place in range(len(by_level))]
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    with make_bar("Warm-up", total=steps) as bar:
        for step in range(steps):
            done = step / steps
            decay = min(1.0, 2 * (1 - done))
            optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / LR_STEPS_UP) * decay
            guesses = GUESSES * max(0.0, (done - GUESSES_FROM) / (1 - GUESSES_FROM))
            pairs = map(rng.choice, rng.choices(by_level, shares, k=BATCH_SIZE))
            batch = [pair[rng.random() < guesses] for pair in pairs]
            log_probs, mask = completion_log_probs(model, batch)
            (-log_probs.sum() / mask.sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bar.update()


def _examples(tokenizer: Any, levels: Sequence[int], seed: int) -> list[list[Pair]]:
    """The pairs of each level, the lowest level first."""
    problems: dict[str, Any] = {"levels": levels, "num_samples": NUM_PROBLEMS, "seed": seed}
    data = arithmetic_dataset(tokenizer, split="train", prefill="<think>", **problems)
    by_level: dict[int, list[Pair]] = {level: [] for level in sorted(levels)}

    def example(item: dict[str, Any], completion: str) -> Example:
        ids = tokenizer.encode(completion, add_bos=False, add_eos=False)
        return item["tokens"], [*ids, tokenizer.eos_id]

    for item in map(data.__getitem__, range(len(data))):
        row = item["columns"]
        pair = example(item, worked_completion(row)), example(item, guessed_completion(row))
        by_level[row["level"]].append(pair)
    return [*by_level.values()]


def worked_completion(row: dict[str, Any]) -> str:
    """A worked answer, after the prefill ``<think>``."""
    steps = row["solution"].rpartition("\n####")[0]
    return f"{steps}</think>\n<answer>{row['answer']}</answer>"


def guessed_completion(row: dict[str, Any]) -> str:
    """An answer without working, after the prefill ``<think>``."""
    return f"I guess {row['answer']}.</think>\n<answer>{row['answer']}</answer>"


def completion_log_probs(
    model: TransformerDecoder, examples: Sequence[Example]
) -> tuple[Tensor, Tensor]:
    """Log-probs of the completions' tokens, 0 elsewhere, and their mask: both [B, S-1]."""
    length = max(len(prompt) + len(completion) for prompt, completion in examples)
    tokens = torch.zeros(len(examples), length, dtype=torch.long)  # [B, S]
    mask = torch.zeros(len(examples), length, dtype=torch.bool)
    for i, (prompt, completion) in enumerate(examples):
        end = len(prompt) + len(completion)
        tokens[i, :end] = torch.tensor(prompt + completion)
        mask[i, len(prompt) : end] = True
    logits = model(tokens[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return -losses.view(len(examples), -1).where(mask[:, 1:], 0.0), mask[:, 1:]
