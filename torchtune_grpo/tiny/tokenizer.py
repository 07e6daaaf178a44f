"""Makes the tiny model's tokenizer: byte-level BPE in which each digit is a token of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from tokenizers.trainers import BpeTrainer
from torchtune.models.llama3._tokenizer import CL100K_PATTERN

_SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
# Llama 3's chat format.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def write_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int) -> dict[str, int | None]:
    """Trains on texts, and writes ``tokenizer.json`` and ``tokenizer_config.json``.

    Reserved special tokens fill up to ``vocab_size``, as in Llama 3, so that each of the model's
    output rows stands for a token.

    Returns:
        dict[str, int | None]: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.
    """
    tokenizer = Tokenizer(BPE())
    words = Split(Regex(CL100K_PATTERN), behavior="isolated")
    digits = Digits(individual_digits=True)
    bytes_ = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([words, digits, bytes_])
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(_SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    free = vocab_size - len(_SPECIAL_TOKENS) - tokenizer.get_vocab_size()
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(free)]
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False) for text in (*_SPECIAL_TOKENS, *reserved)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "pad_token": "<|finetune_right_pad_id|>",
    }
    config = special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return {f"{name}_id": tokenizer.token_to_id(text) for name, text in special.items()}
