"""Make the weights of the tiny model that the package ships; with 0 steps, random ones.

    python tests/tiny_llama.py torchtune_grpo/tiny_llama

They are taught the questions of `tiny_arithmetic_grpo` with their answers: worked out, and in the
last quarter more and more often guessed, which reinforcement learning can then drop. The config and
the tokenizer, in which each digit is a token, stay as they are.
"""

import argparse
import random
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torchtune.modules import TransformerDecoder

from torchtune_grpo.data import arithmetic_dataset
from torchtune_grpo.models import hf_model, hf_tokenizer
from torchtune_grpo.models.tiny import prepare
from torchtune_grpo.models.weights import hf_state

# All found by trial.
LR, LR_RISES = 2e-3, 50  # in so many steps
GUESSES, GUESSES_FROM = 0.8, 0.75  # their final share; the share of steps before the first
LEVELS = {1: 1, 2: 2, 3: 4}  # -> how often; a higher one has more facts to learn


def random_model(folder: str) -> TransformerDecoder:
    model = hf_model(folder)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            # torchtune's N(0, 1) embeddings are tied and would start with huge logits.
            std = 0.02 if name.startswith("tok_embeddings") else weight.shape[1] ** -0.5
            torch.nn.init.normal_(weight, std=std)
    return model


def examples(folder: str) -> list[list[tuple]]:
    """Return, by level, the tokens of each question, of its answer worked out, and of a guess."""
    tokenizer = hf_tokenizer(folder)
    data = arithmetic_dataset(
        tokenizer, levels=[*LEVELS], split="train", num_samples=8000, prefill="<think>"
    )
    by_level: dict[int, list[tuple]] = {level: [] for level in LEVELS}
    for item in map(data.__getitem__, range(len(data))):
        row = item["columns"]
        worked = row["solution"].rpartition("\n####")[0]
        texts = [
            f"{thought}</think>\n<answer>{row['answer']}</answer>"
            for thought in (worked, f"I guess {row['answer']}.")
        ]
        answers = (tokenizer.encode(text, add_bos=False) for text in texts)
        by_level[row["level"]].append((item["tokens"], *answers))
    return [*by_level.values()]


def teach(model: TransformerDecoder, by_level: list[list[tuple]], steps: int) -> None:
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        done = step / steps
        rate = LR * min(1.0, (step + 1) / LR_RISES) * min(1.0, 2 * (1 - done))
        optimizer.param_groups[0]["lr"] = rate
        guesses = GUESSES * max(0.0, (done - GUESSES_FROM) / (1 - GUESSES_FROM))
        drawn = map(rng.choice, rng.choices(by_level, [*LEVELS.values()], k=16))
        batch = [(each[0], each[1 + (rng.random() < guesses)]) for each in drawn]
        mean_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def mean_loss(model: TransformerDecoder, batch: Iterable[tuple]) -> torch.Tensor:
    """Return the loss of the answers' tokens."""
    rows = [torch.tensor([*question, *answer]) for question, answer in batch]
    golds = [torch.tensor([*[-100] * len(question), *answer]) for question, answer in batch]
    pad = torch.nn.utils.rnn.pad_sequence
    tokens, labels = pad(rows, True), pad(golds, True, -100)[:, 1:]  # [B, S], [B, S-1]
    logits = model(tokens[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.sum() / (labels != -100).sum()


def main() -> None:
    """Make the folder, or only its weights anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=3000, help="3000 take two minutes")
    args = parser.parse_args()
    prepare(args.folder)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = random_model(args.folder)
    if args.steps:
        teach(model, examples(args.folder), args.steps)
    weights = hf_state(model.state_dict(), args.folder)
    # Not save_file, whose files only their owner can read.
    (Path(args.folder) / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))


if __name__ == "__main__":
    main()
