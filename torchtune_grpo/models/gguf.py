"""A model's folder made of a GGUF, the file of llama.cpp, by transformers and the package gguf.

transformers passes over what it does not know of such a file. Where that would make another model
or tokenizer, ``config.json`` or ``tokenizer.json`` has to stand beside the GGUF; files that are
there are taken as they are.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tokenizers import Regex, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing
from torchtune.utils import get_logger

from torchtune_grpo.config.text import describe, naming, shortened
from torchtune_grpo.models.tokenizer import is_before_transformers_5, only_errors

_log = get_logger("INFO")

# Keys of an architecture that transformers reads, or which the sizes of weights must agree with
_READ = {"context_length", "block_count", "feed_forward_length", "embedding_length", "vocab_size"}
_READ |= {"rope.freq_base", "rope.dimension_count", "attention.layer_norm_rms_epsilon"}
_READ |= {f"attention.{of}" for of in ("head_count", "head_count_kv", "key_length", "value_length")}
# Architectures whose configs it makes of these keys, and others that it reads for them
_ARCHITECTURES = dict.fromkeys(("llama", "qwen2", "qwen3"), _READ)
_ARCHITECTURES["gemma3"] = _READ | {"attention.sliding_window"}


def _words(numbers: str) -> PreTokenizer:
    """Cut a text like GPT-4's tokenizer, but for its numbers."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        rf"{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    return Sequence([Split(Regex(pattern), behavior="isolated"), to_bytes])


_GPT2 = ByteLevel(add_prefix_space=False)
_CUTS: dict[str, tuple[PreTokenizer, normalizers.Normalizer | None]] = {  # by tokenizer.ggml.pre
    "gpt-2": (_GPT2, None),
    "smollm": (Sequence([Digits(individual_digits=True), _GPT2]), None),
    "qwen2": (_words(r"\p{N}"), normalizers.NFC()),
    "llama-bpe": (_words(r"\p{N}{1,3}"), None),
}


def awaits_conversion(folder: Path) -> bool:
    """Tell whether a folder has a GGUF and no other weights."""
    has = {kind: any(folder.glob(f"*.{kind}")) for kind in ("gguf", "safetensors", "bin")}
    return has["gguf"] and not (has["safetensors"] or has["bin"])


def complete(folder: Path) -> None:
    """Write beside a folder's GGUF what it lacks; several processes may call this at once."""
    if not awaits_conversion(folder):
        return
    gguf, *others = sorted(folder.glob("*.gguf"))
    if others:
        raise ValueError(f"model_dir={folder}: holds {len(others) + 1} GGUFs; leave one there.")
    work = folder / ".gguf.part"
    with naming(f"model_dir={folder}, where weights in bf16 go"), FileLock(folder / ".gguf.lock"):
        if awaits_conversion(folder):
            shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
            convert(gguf, work, given=folder)
            for file in sorted(work.iterdir(), key=lambda file: "safetensors" in file.name):
                if not (folder / file.name).exists():
                    file.rename(folder / file.name)
            shutil.rmtree(work)


def check_packages(what: str) -> None:
    """Raise a ValueError if ``what`` needs packages that are not installed."""
    missing = any(find_spec(name) is None for name in ("accelerate", "gguf"))
    if missing or is_before_transformers_5():
        needs = '`pip install gguf accelerate "transformers>=5"`, the extra smollm2'
        raise ValueError(f"{what}: needs {needs}.")


def convert(
    gguf: Path, folder: Path, *, given: Path | None = None, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a GGUF as a folder in the hub's format, with weights in ``dtype``.

    ``config.json`` and ``tokenizer.json`` are taken from the folder ``given``, if they are there.
    Raises a ValueError if transformers would make another model or tokenizer than the file's.
    """
    check_packages(str(gguf))
    _log.info(f"{gguf}: dequantizing its weights to {str(dtype).removeprefix('torch.')}.")
    has_config, has_tokenizer = (
        given is not None and (given / f"{name}.json").is_file() for name in ("config", "tokenizer")
    )
    try:
        with only_errors():
            file = _File(gguf)
            tokenizer = None if has_tokenizer else file.tokenizer()
            model = file.model(given if has_config else None, dtype)
            model.save_pretrained(folder)
            # transformers 4 knows no ``rope_parameters``.
            rope = getattr(model.config, "rope_parameters", None) or {}
            _change(folder / "config.json", {k: v for k, v in rope.items() if k == "rope_theta"})
            if tokenizer is not None:
                tokenizer.model_max_length = model.config.max_position_embeddings
                _write_tokenizer(tokenizer, folder)
    except Exception as error:  # of any type: the file may hold anything
        if getattr(error, "errno", None):  # the system's
            raise
        said = shortened(describe(error).removeprefix("ValueError: "), 300)
        raise ValueError(f"{gguf}: {said}") from error
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors lets only their owner read files


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer beside its model's config, by whose type transformers may change it."""
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(folder)
    # transformers 4 does not know the class that 5 has saved.
    _change(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    read = AutoTokenizer.from_pretrained(folder)
    ours, theirs = (json.loads(each.backend_tokenizer.to_str()) for each in (tokenizer, read))
    if any(ours[part] != theirs[part] for part in ("normalizer", "pre_tokenizer")):
        raise ValueError(
            "its tokenizer.ggml.pre is not that of its architecture, which transformers takes for "
            "all models of that; the model cannot be trained."
        )


def _change(file: Path, changes: dict[str, object]) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(content, indent=2) + "\n")


class _File:
    """A GGUF, and what transformers reads of it."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(path)
        self._where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}

    def _value(self, key: str) -> Any:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def tokenizer(self) -> Any:
        """Return transformers' tokenizer, which cuts texts as the file says."""
        from transformers import AutoTokenizer

        kind, cut = self._value("tokenizer.ggml.model"), self._value("tokenizer.ggml.pre")
        prefix = self._value("tokenizer.ggml.add_space_prefix")
        if cut not in _CUTS if kind == "gpt2" else kind != "llama" or prefix is not False:
            raise ValueError(
                f"its tokenizer (model {kind}, pre {cut}, add_space_prefix {prefix}) is not one "
                f"that is known: gpt2 with pre {', '.join(_CUTS)}, or llama without a prefix; put "
                "the model's tokenizer.json and tokenizer_config.json beside it."
            )
        tokenizer: Any = AutoTokenizer.from_pretrained(**self._where)
        backend = tokenizer.backend_tokenizer
        if kind == "gpt2":
            backend.pre_tokenizer, backend.normalizer = _CUTS[cut]
            backend.model.ignore_merges = cut == "llama-bpe"  # for words that are tokens
        begins = self._value("tokenizer.ggml.add_bos_token")
        if kind == "llama" or cut == "llama-bpe" if begins is None else begins:
            bos = (tokenizer.bos_token, tokenizer.bos_token_id)
            backend.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
        return tokenizer

    def model(self, given: Path | None, dtype: torch.dtype) -> Any:
        """Return transformers' model, with the config in the folder ``given`` or the file's."""
        from transformers import AutoConfig, AutoModelForCausalLM

        if given is None:
            self._check_keys()
            config = AutoConfig.from_pretrained(**self._where)
        else:
            config = AutoConfig.from_pretrained(given)
        sizes = {tensor.name: int(tensor.n_elements) for tensor in self._reader.tensors}
        floats = ("F32", "F16", "BF16")
        rounded = [t.name for t in self._reader.tensors if t.tensor_type.name not in floats]
        is_tied, has_head = config.tie_word_embeddings, "output.weight" in sizes
        if has_head:
            config.tie_word_embeddings = False  # both are read
        where = {**self._where, "config": config, "dtype": dtype}
        model: Any = AutoModelForCausalLM.from_pretrained(**where)
        # A config has the scaled rotations that a GGUF has beside the weights.
        held = [n for name, n in sizes.items() if given is None or not name.startswith("rope_")]
        if sum(held) != sum(parameter.numel() for parameter in model.parameters()):
            raise ValueError(
                "transformers does not read these weights and no others (rope_freqs.weight, for "
                "instance, are scaled rotations); put the model's config.json beside it."
            )
        model.hf_quantizer = None  # with which it could not be saved
        del model.config.quantization_config
        if has_head:
            head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
            gap = (head.weight - embeddings.weight).norm()
            # Rounded in two ways, one matrix still resembles itself.
            most = 0.5 * head.weight.norm() if "output.weight" in rounded else 0.0
            if is_tied or gap <= most:
                embeddings.weight, model.config.tie_word_embeddings = head.weight, True
        return model

    def _check_keys(self) -> None:
        """Raise a ValueError if transformers does not read all keys of the architecture."""
        name = self._value("general.architecture")
        known = {f"{name}.{key}" for key in _ARCHITECTURES.get(name, ())}
        keys = {key for key in self._reader.fields if key.startswith(f"{name}.")}
        if unread := keys - known:
            raise ValueError(
                f"transformers makes no exact config for {name} with {min(unread)}; put the "
                "model's config.json beside it."
            )
