"""Makes the tiny model's tokenizer: byte-level BPE in tiktoken's and Hugging Face's formats."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import regex
from torchtune.models.llama3._tokenizer import CL100K_PATTERN
from torchtune.models.qwen2._tokenizer import bytes_to_unicode

_SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
)

# Llama 3's chat format, as torchtune's Llama3Tokenizer writes it.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

Merge = tuple[bytes, bytes]


def train_merges(texts: Iterable[str], max_merges: int) -> list[Merge]:
    """Learns byte-pair merges (Sennrich et al. 2016, arXiv:1508.07909) inside words.

    Chunks with a digit are left alone, so every digit stays a token of its own.

    Returns at most ``max_merges``, the first learnt first; fewer if every word is one token.
    """
    counts = Counter(chunk for text in texts for chunk in regex.findall(CL100K_PATTERN, text))
    words = {
        chunk: [bytes([byte]) for byte in chunk.encode()]
        for chunk in counts
        if not any(map(str.isdigit, chunk))
    }
    merges: list[Merge] = []
    while len(merges) < max_merges:
        pairs: Counter[Merge] = Counter()
        for chunk, parts in words.items():
            for pair in zip(parts[:-1], parts[1:], strict=True):
                pairs[pair] += counts[chunk]
        if not pairs:
            break
        # Ties go to the greater pair, so the result does not depend on the order of the texts.
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        words = {chunk: _merge(parts, best) for chunk, parts in words.items()}
    return merges


def _merge(parts: list[bytes], pair: Merge) -> list[bytes]:
    merged: list[bytes] = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def write_tokenizer(folder: Path, merges: list[Merge], vocab_size: int) -> None:
    """Writes ``tokenizer.model`` (tiktoken), ``tokenizer.json`` and ``tokenizer_config.json``.

    Reserved special tokens fill up to ``vocab_size``, as in Llama 3, so that each of the model's
    output rows stands for a token.
    """
    tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("".join(lines))
    num_reserved = vocab_size - len(tokens) - len(_SPECIAL_TOKENS)
    assert num_reserved >= 0, "the merges do not fit into the vocabulary"
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(num_reserved)]
    special = dict(zip([*_SPECIAL_TOKENS, *reserved], range(len(tokens), vocab_size), strict=True))
    _write_json(folder / "tokenizer.json", _hugging_face_tokenizer(tokens, merges, special))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "pad_token": "<|finetune_right_pad_id|>",
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _hugging_face_tokenizer(
    tokens: list[bytes], merges: list[Merge], special: dict[str, int]
) -> dict[str, object]:
    letters = bytes_to_unicode()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {"type": "Split", "pattern": {"Regex": CL100K_PATTERN}, "behavior": "Isolated"}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": name, "special": True, **flags}
            for name, index in special.items()
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{**split, "invert": False}, {**byte_level, "use_regex": False}],
        },
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {spell(token): rank for rank, token in enumerate(tokens)},
            "merges": [f"{spell(left)} {spell(right)}" for left, right in merges],
        },
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
