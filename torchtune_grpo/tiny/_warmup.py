"""The tiny model's warm-up: supervised, until it can reason but mostly does not bother to.

First it learns to work problems out step by step, then to write down a guess in most cases. A
sampled answer is then right only where the model happened to work it out, and reinforcement
learning finds out that working it out pays.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtune.modules import TransformerDecoder
from torchtune.utils import get_logger

from torchtune_grpo.data import arithmetic_dataset
from torchtune_grpo.memory import keep_freed_memory

_log = get_logger("INFO")

Example = tuple[list[int], list[int]]  # tokens of a prompt, tokens of its completion

NUM_PROBLEMS, BATCH_SIZE = 8000, 16
# Learning rates and lengths of the stages, found by trial.
LR, WARMUP, ENOUGH, COOLDOWN = 4e-3, 50, 0.65, 800
GUESS_LR, GUESS_STEPS = 1e-3, 80
FEW_GUESSES, MANY_GUESSES = 0.1, 0.75


def warm_up(
    model: TransformerDecoder,
    tokenizer: Any,
    *,
    seed: int,
    levels: list[int],
    max_steps: int,
) -> None:
    """Trains a model with random weights in place.

    ``seed`` is that of the problems and their order, ``levels`` are the problems', and
    ``max_steps`` counts both stages together; 0 does nothing.
    """
    if max_steps == 0:
        return
    keep_freed_memory()
    worked, guessed = _examples(tokenizer, levels, seed)
    rng = random.Random(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second thread costs such a small model more than it gives
    try:
        steps = _learn_to_work(model, worked, guessed, rng, max_steps)
        _learn_to_guess(model, worked, guessed, rng, max_steps - steps)
    finally:
        torch.set_num_threads(threads)


def _learn_to_work(
    model: TransformerDecoder,
    worked: Sequence[Example],
    guessed: Sequence[Example],
    rng: random.Random,
    max_steps: int,
) -> int:
    """Stage 1: working out, and a few guesses so that stage 2 has less to change.

    Returns the number of steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    accuracy, cooling_from = 0.0, None
    for step in range(max_steps):
        if cooling_from is None and accuracy > ENOUGH:
            cooling_from = step
        left = 1.0 if cooling_from is None else 1 - (step - cooling_from) / COOLDOWN
        if left <= 0:
            return step
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / WARMUP) * left
        batch, is_guess = _draw(worked, guessed, rng, BATCH_SIZE, FEW_GUESSES)
        chance = _train_step(model, optimizer, batch)[~is_guess]
        if len(chance):
            accuracy += 0.04 * (chance.mean().item() - accuracy)
        if (step + 1) % 200 == 0:
            _log.info(f"warm-up step {step + 1}: works out about {accuracy:.0%}")
    return max_steps


def _learn_to_guess(
    model: TransformerDecoder,
    worked: Sequence[Example],
    guessed: Sequence[Example],
    rng: random.Random,
    max_steps: int,
) -> None:
    """Stage 2: a fixed number of steps with a learning rate that ends at 0, so that it settles."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(min(GUESS_STEPS, max_steps)):
        optimizer.param_groups[0]["lr"] = GUESS_LR * (1 - step / GUESS_STEPS)
        batch, _ = _draw(worked, guessed, rng, 2 * BATCH_SIZE, MANY_GUESSES)
        _train_step(model, optimizer, batch)


def _draw(
    worked: Sequence[Example],
    guessed: Sequence[Example],
    rng: random.Random,
    size: int,
    share: float,
) -> tuple[list[Example], Tensor]:
    """Draws different problems, each answered by a guess with the given chance."""
    rows = rng.sample(range(len(worked)), size)
    is_guess = [rng.random() < share for _ in rows]
    batch = [(guessed if g else worked)[row] for row, g in zip(rows, is_guess, strict=True)]
    return batch, torch.tensor(is_guess)


def _train_step(
    model: TransformerDecoder, optimizer: torch.optim.Optimizer, batch: Sequence[Example]
) -> Tensor:
    """One optimizer step. Returns each completion's chance of being sampled as it stands, [B]."""
    log_probs, mask = completion_log_probs(model, batch)
    (-log_probs.sum() / mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return log_probs.detach().sum(dim=1).exp()


def _examples(tokenizer: Any, levels: list[int], seed: int) -> tuple[list[Example], list[Example]]:
    problems: dict[str, Any] = {"levels": levels, "num_samples": NUM_PROBLEMS, "seed": seed}
    data = arithmetic_dataset(tokenizer, split="train", prefill="<think>", **problems)
    items = [data[index] for index in range(len(data))]

    def example(item: dict[str, Any], completion: str) -> Example:
        ids = tokenizer.encode(completion, add_bos=False, add_eos=False)
        return item["tokens"], [*ids, tokenizer.eot_id]

    worked = [example(item, worked_completion(item["columns"])) for item in items]
    return worked, [example(item, guessed_completion(item["columns"])) for item in items]


def worked_completion(row: dict[str, Any]) -> str:
    """A worked answer, behind the prefill ``<think>``."""
    steps = row["solution"].rpartition("\n####")[0]
    return f"{steps}</think>\n<answer>{row['answer']}</answer>"


def guessed_completion(row: dict[str, Any]) -> str:
    """An answer without working, behind the prefill ``<think>``."""
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
