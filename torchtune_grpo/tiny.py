"""The tiny model's checkpoint folder, in the format of the Hugging Face hub.

The model is warm-started on worked arithmetic until it solves some problems, so that reinforcement
learning has something to reinforce. In its tokenizer each digit is a token of its own.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from filelock import FileLock
from safetensors.torch import save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from torchtune.models.llama3._tokenizer import CL100K_PATTERN
from torchtune.modules import TransformerDecoder
from torchtune.utils import get_logger

from torchtune_grpo.config.text import read_json
from torchtune_grpo.data import arithmetic_dataset, arithmetic_problems
from torchtune_grpo.data.presets import LEVELS
from torchtune_grpo.machine.device import keep_freed_memory, limit_threads, make_bar
from torchtune_grpo.models import hf_model, hf_state, hf_tokenizer

# For QLoRA each weight has to be a multiple of 64 * 256 numbers: NF4's blocks, and their scales'.
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 448,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
_SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
_NAMED_TOKENS = {
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|eot_id|>",
    "pad_token": "<|finetune_right_pad_id|>",
}
# Llama 3's chat format.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_SETTINGS_KEY = "torchtune_grpo_tiny"

_log = get_logger("INFO")


def make_tiny_checkpoint(
    output_dir: str | Path,
    *,
    seed: int = 0,
    levels: Sequence[int] = (1, 2, 3),
    warmup_steps: int = 3000,
) -> Path:
    """Make the tiny model, warm-start it, and write its checkpoint folder in one move.

    An earlier tiny checkpoint in the folder is replaced. The warm-up's problems have these levels
    of :func:`~torchtune_grpo.data.arithmetic_problems`; 0 steps leave the weights random.
    """
    settings = {"seed": seed, "levels": list(levels), "warmup_steps": warmup_steps}
    target = Path(output_dir).absolute()
    if target.exists() and (others := {path.name for path in target.iterdir()} - set(_FILES)):
        raise ValueError(
            f"checkpoint_dir: {target} holds other files ({', '.join(sorted(others)[:5])}). "
            "Name a new folder."
        )
    _log.info("Making a tiny Llama that can add: 1 or 2 minutes.")
    with new_folder(target) as folder:
        ids = _write_tokenizer(folder)
        _write_json(folder / "config.json", _CONFIG | ids | {_SETTINGS_KEY: settings})
        model = _random_model(folder, seed)
        tokenizer = hf_tokenizer(str(folder))
        warm_up(model, tokenizer, seed=seed, levels=levels, steps=warmup_steps)
        weights = hf_state(model.state_dict(), folder)
        # Not save_file, whose files only their owner can read.
        (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
    return target


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder that becomes ``target``, in one move, when the block has filled it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        folder = Path(name) / target.name
        folder.mkdir()
        yield folder
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    _log.info(f"Made {target.name} in {time.perf_counter() - start:.0f} s.")


def prepare(checkpoint_dir: str | Path, **settings: Any) -> None:
    """Make the tiny checkpoint unless it exists; several processes may call this at once.

    The settings are those of :func:`make_tiny_checkpoint`; one made with others is an error.
    """
    folder = Path(checkpoint_dir).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if not all((folder / name).is_file() for name in _FILES):
            make_tiny_checkpoint(folder, **settings)
            return
    made = read_json(folder, "config.json", key="checkpoint_dir").get(_SETTINGS_KEY, {})
    differing = {key: made.get(key) for key, value in settings.items() if made.get(key) != value}
    if differing:
        raise ValueError(
            f"prepare: {folder} was made with {differing}, the config asks for "
            f"{ {key: settings[key] for key in differing} }. "
            "Delete the folder, or name another checkpoint_dir."
        )


def _write_tokenizer(folder: Path) -> dict[str, int | None]:
    """Train a byte-level BPE tokenizer and write its files; return the ids of its named tokens.

    Reserved special tokens fill up the vocabulary, as in Llama 3, so that the model cannot sample
    an id without a token.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CL100K_PATTERN), behavior="isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    size = _CONFIG["vocab_size"] - len(_SPECIAL_TOKENS)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_texts(), trainer)
    free = size - tokenizer.get_vocab_size()
    special = [*_SPECIAL_TOKENS, *(f"<|reserved_special_token_{i}|>" for i in range(free))]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _NAMED_TOKENS | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", config)
    return {f"{name}_id": tokenizer.token_to_id(text) for name, text in _NAMED_TOKENS.items()}


def _texts() -> Iterator[str]:
    """Texts of all levels with a fixed seed, so that no setting changes the vocabulary."""
    rows = arithmetic_problems(levels=LEVELS, split="train", num_samples=560)
    yield from (f"{row['question']}\n\n<think>{worked_completion(row)}" for row in rows)
    yield from map(guessed_completion, rows[:70])
    yield from ("system", "user", "assistant", "\n\n")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _random_model(folder: Path, seed: int) -> TransformerDecoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf_model(str(folder))
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                # torchtune's N(0, 1) embeddings are tied and would start with huge logits.
                std = 0.02 if name.startswith("tok_embeddings") else weight.shape[1] ** -0.5
                torch.nn.init.normal_(weight, std=std)
    return model


Example = tuple[list[int], list[int]]  # tokens of a prompt, tokens of its completion
Pair = tuple[Example, Example]  # a problem worked out, and guessed

# All found by trial.
NUM_PROBLEMS, BATCH_SIZE = 8000, 16
LR, LR_WARMUP_STEPS = 2e-3, 50
GUESSES, GUESSES_FROM = 0.8, 0.75  # their final share; the share of steps before the first
LEVEL_RATIO = 2  # frequency of a level relative to the one below, which has fewer facts to learn


def warm_up(
    model: TransformerDecoder, tokenizer: Any, *, seed: int, levels: Sequence[int], steps: int
) -> None:
    """Train a model with random weights in place; the seed decides the problems and their order."""
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
            optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / LR_WARMUP_STEPS) * decay
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
