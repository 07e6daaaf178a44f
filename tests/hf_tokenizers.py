"""Small real tokenizers with the special tokens and the chat templates of known models."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

_TEXTS = [
    "What is the sum of these numbers? system user assistant model\n\n",
    "Cutting Knowledge Date: December 2023 Today Date: 26 Jul 2024 You are a helpful assistant.",
]
_CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """Tokens and chat template of a model; without a text, the template is the trl wheel's."""

    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    adds_bos: bool = False
    plain: tuple[str, ...] = ()  # added tokens that are not special
    template: str | None = None
    is_sentencepiece: bool = False


_QWEN = Family(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    plain=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    eos="<|im_end|>",
)
_GEMMA = Family(
    special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    plain=("\n\n", "\n\n\n"),
    bos="<bos>",
    eos="<eos>",
    adds_bos=True,
    is_sentencepiece=True,
)
FAMILIES = {
    "llama3_2": Family(
        special=(
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        adds_bos=True,
    ),
    "qwen2_5": _QWEN,
    "qwen3": _QWEN,
    "smollm2": Family(
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        bos="<|im_start|>",
        eos="<|im_end|>",
        template=_CHATML,
    ),
    "deepseek_r1_distill": Family(
        special=("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
        plain=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        adds_bos=True,
    ),
    "gemma": _GEMMA,
    "gemma3": _GEMMA,
}


def write_tokenizer(folder: Path, name: str, *, has_template: bool = True) -> Path:
    """Write the files of a family's tokenizer, of fewer than 400 tokens, as the hub has them."""
    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE(byte_fallback=family.is_sentencepiece))
    special = [AddedToken(text, special=True, normalized=False) for text in family.special]
    if family.is_sentencepiece:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet, first = [], [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet, first = pre_tokenizers.ByteLevel.alphabet(), []
    trainer = BpeTrainer(
        vocab_size=360, initial_alphabet=alphabet, special_tokens=first, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    if family.is_sentencepiece:  # bytes are no special tokens
        tokenizer = _without_added_tokens(tokenizer)
    tokenizer.add_tokens(special)
    plain = [AddedToken(text, special=False, normalized=False) for text in family.plain]
    tokenizer.add_tokens(plain)
    if family.adds_bos:
        bos = str(family.bos)
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=family.bos, eos_token=family.eos
    )
    if has_template:
        fast.chat_template = family.template or _trl_template(name)
    fast.save_pretrained(folder)
    return folder


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(content))


def _trl_template(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "chat_templates" / f"{name}.jinja"
    return path.read_text(encoding="utf-8")
