"""A GGUF's folder has transformers' model and the model's tokenizer, or one line says why not."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    get_tensor_name_map,
    quants,
)
from hf_models import hf_folder
from runs import run
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from torchtune_grpo.models import HFCheckpointer, gguf, hf_model, hf_tokenizer

TEXT = "I don't: 12345 + ??\n\n  Cafe\u0301 zebra\r\n x\u00b2 \u6771\u4eac<|im_end|>\n"
MERGES = [*zip("11", "23"), *zip("nĊ?ĠĠ", "'Ċ?Ġz"), ("12", "3"), ("??", "Ċ"), ("ĊĊ", "ĠĠ")]
END = "<|im_end|>"
# How the tokenizers of published models cut a text, and whether they look up whole words
BYTES, GPT2 = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevel(add_prefix_space=False)
CUTS: dict[str, tuple[list[Any], Any, bool]] = {
    "gpt-2": ([GPT2], None, False),
    "smollm": ([Digits(individual_digits=True), GPT2], None, False),
    **{
        name: (
            [Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated"), BYTES],
            normalizers.NFC() if name == "qwen2" else None,
            name == "llama-bpe",
        )
        for name in ("qwen2", "llama-bpe")
    },
}
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "stablelm": MODEL_ARCH.STABLELM,
}


def tokenizer_of(name: str) -> Tokenizer:
    """A tokenizer with merges over words, so that each way to cut a text gives other tokens."""
    words = [*sorted(ByteLevel.alphabet()), *map("".join, MERGES), "Ġzebra"]
    cuts, normalizer, takes_words = CUTS[name]
    model = models.BPE({word: n for n, word in enumerate(words)}, MERGES, ignore_merges=takes_words)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokenizer.pre_tokenizer, tokenizer.decoder = Sequence(cuts), decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def write_gguf(
    folder: Path,
    source: Path,
    *,
    pre: str = "qwen2",
    tokenizer: str = "gpt2",
    types: Mapping[str, str] | None = None,
    **keys: float,
) -> Path:
    """Write a model's folder as llama.cpp's converter does, and return the file's.

    ``types`` are those of the weights that are not in float32, and ``keys`` further ones of the
    architecture.
    """
    model = AutoModelForCausalLM.from_pretrained(source)
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    folder = folder / "gguf"
    folder.mkdir()
    file = GGUFWriter(folder / "model.gguf", MODEL_ARCH_NAMES[architecture])
    file.add_context_length(config.max_position_embeddings)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_embedding_length(config.hidden_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", 1e-5))
    file.add_rope_freq_base(config.rope_parameters["rope_theta"])
    file.add_vocab_size(config.vocab_size)
    for key, value in keys.items():
        file.add_float32(f"{MODEL_ARCH_NAMES[architecture]}.{key.replace('__', '.')}", value)
    vocab = tokenizer_of(pre if pre in CUTS else "gpt-2").get_vocab()
    unused = [f"[PAD{n}]" for n in range(len(vocab), config.vocab_size)]
    file.add_tokenizer_model(tokenizer)
    file.add_tokenizer_pre(pre)
    file.add_token_list([*sorted(vocab, key=vocab.__getitem__), *unused])
    file.add_token_types([3 if n == vocab[END] else 1 for n in range(config.vocab_size)])
    file.add_token_merges([" ".join(pair) for pair in MERGES])
    file.add_bos_token_id(vocab[END])
    file.add_eos_token_id(vocab[END])
    known = get_tensor_name_map(architecture, config.num_hidden_layers)
    state = model.state_dict()
    if config.tie_word_embeddings and not types:
        del state["lm_head.weight"]
    for name, value in state.items():
        module, _, leaf = name.rpartition(".")
        theirs = f"{known.get_name(module)}.{leaf}"
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if architecture is MODEL_ARCH.LLAMA and (n := heads.get(module.rpartition(".")[2])):
            value = (
                value.unflatten(0, (n, 2, -1)).transpose(1, 2).flatten(0, 2)
            )  # pairs, not halves
        kind = GGMLQuantizationType[(types or {}).get(theirs, "F32")]
        file.add_tensor(theirs, quants.quantize(value.contiguous().numpy(), kind), raw_dtype=kind)
    if config.rope_parameters["rope_type"] == "llama3":
        file.add_tensor("rope_freqs.weight", np.ones(config.head_dim // 2, dtype=np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return folder


@pytest.mark.parametrize("name", ["llama2", "qwen2", "qwen2_untied", "qwen3"])
def test_the_model_is_that_of_the_file(tmp_path, name):
    sizes = {"head_dim": 128} if name == "qwen3" else {}  # else transformers takes that
    source = hf_folder(name, tmp_path / "model", **sizes)
    folder, tokens = write_gguf(tmp_path, source), torch.arange(40)[None]
    gguf.convert(folder / "model.gguf", tmp_path / "made", dtype=torch.float32)
    made = str(tmp_path / "made")
    ours = hf_model(made)
    ours.load_state_dict(HFCheckpointer(made, "out").load_checkpoint()["model"])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source)(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pre", CUTS)
def test_the_tokenizer_is_that_of_the_file(tmp_path, pre):
    kind = "qwen2" if pre == "qwen2" else "llama2"
    folder = write_gguf(tmp_path, hf_folder(kind, tmp_path / "model"), pre=pre)
    gguf.complete(folder)
    made, expected = hf_tokenizer(str(folder)), tokenizer_of(pre)
    assert made.encode(TEXT, add_bos=False, add_eos=False) == expected.encode(TEXT).ids
    assert expected.encode(TEXT).ids not in [
        tokenizer_of(name).encode(TEXT).ids for name in CUTS if name != pre
    ]
    begin = [expected.token_to_id(END)] if pre == "llama-bpe" else []
    assert made.encode("1", add_eos=False) == [*begin, expected.token_to_id("1")]
    assert made.stop_tokens == [expected.token_to_id(END)]
    (folder / "config.json").write_text("{}")
    gguf.complete(folder)  # once
    assert (folder / "config.json").read_text() == "{}"


def test_sentencepieces_tokens_are_those_of_the_file(tmp_path):
    lines = Path(__file__).read_text().splitlines()
    rules = dict(add_dummy_prefix=False, remove_extra_whitespaces=False, byte_fallback=True)
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=500,
        normalization_rule_name="identity",
        **rules,
    )
    pieces = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    numbers = range(pieces.get_piece_size())
    file = GGUFWriter(tmp_path / "model.gguf", "gemma3")
    for key in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count"):
        file.add_uint32(f"gemma3.{key}", 8)
    file.add_tokenizer_model("llama")
    file.add_add_space_prefix(False)
    file.add_token_list([pieces.id_to_piece(number) for number in numbers])
    file.add_token_scores([pieces.get_score(number) for number in numbers])
    file.add_token_types(
        [3 if pieces.is_control(n) else 6 if pieces.is_byte(n) else 1 for n in numbers]
    )
    file.add_bos_token_id(pieces.bos_id())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.close()
    made = gguf._File(tmp_path / "model.gguf").tokenizer()
    for text in [TEXT.replace(END, ""), *lines]:
        assert made(text).input_ids == [pieces.bos_id(), *pieces.encode(text)]


def test_one_matrix_that_was_quantized_twice_has_the_outputs_values(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64}  # quantized in blocks of 32
    source = hf_folder("qwen2", tmp_path / "model", **sizes)
    types = {"token_embd.weight": "Q4_0", "output.weight": "Q8_0"}
    folder = write_gguf(tmp_path, source, types=types)
    gguf.complete(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    whole = AutoModelForCausalLM.from_pretrained(source).lm_head.weight.detach().numpy()
    kind = GGMLQuantizationType.Q8_0
    eighth = torch.from_numpy(quants.dequantize(quants.quantize(whole, kind), kind))
    assert torch.equal(model.lm_head.weight, eighth.bfloat16().float())


SCALED = dict(rope__scaling__factor=4.0)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a key that is not read": (
        "qwen2",
        SCALED,
        "for qwen2 with qwen2.rope.scaling.factor.*config.json",
    ),
    "weights that are not read": (
        "llama3",
        {},
        "does not read these weights and no others.*config.json",
    ),
    "an unknown cut": ("qwen2", {"pre": "tekken"}, r"pre tekken.*tokenizer.json"),
    "a prefix": ("llama2", {"tokenizer": "llama"}, r"model llama, .* None\).*tokenizer.json"),
    "a type's own cut": ("qwen2", {"pre": "gpt-2"}, "ggml.pre is not that of its arch"),
    "other defaults": ("qwen3", {}, "size mismatch|sizes"),
    "an architecture": ("stablelm", {}, "for stablelm with .*config.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_another_model_is_refused(tmp_path, case):
    name, keys, message = REFUSED[case]
    folder = write_gguf(tmp_path, hf_folder(name, tmp_path / "model"), **keys)
    with pytest.raises(ValueError, match=f"^{re.escape(str(folder))}/model.gguf: .*{message}"):
        gguf.complete(folder)
    assert {file.name for file in folder.iterdir()} <= {"model.gguf", ".gguf.lock", ".gguf.part"}


def test_files_beside_the_gguf_are_taken(tmp_path):
    """With them, scaled rotations and any way to cut a text can be read."""
    source = hf_folder("llama3", tmp_path / "model")
    folder = write_gguf(tmp_path, source, pre="tekken", **SCALED)
    shutil.copy(source / "config.json", folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("smollm")).save_pretrained(folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    gguf.complete(folder)
    assert before.items() <= {file.name: file.read_bytes() for file in folder.iterdir()}.items()
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        expected = AutoModelForCausalLM.from_pretrained(source)
        for parameter in expected.parameters():
            parameter.copy_(parameter.bfloat16())
        torch.testing.assert_close(logits, expected(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_folder_with_a_gguf_is_a_model_like_any_other(tmp_path):
    folder = write_gguf(tmp_path, hf_folder("llama2", tmp_path / "model"), pre="llama-bpe")
    asked = ["--prompt", "1", "device=cpu", "dataset.chat=false", "max_generated_tokens=4"]
    shown = run("-m", "torchtune_grpo", "sample", folder, *asked, cwd=tmp_path)
    assert "--- sample" in shown.out
    assert "dequantizing its weights to bfloat16" in shown.out + shown.err
    assert (folder / "model.safetensors").is_file()


def test_mistakes_are_told_in_one_line(tmp_path, monkeypatch):
    folder = write_gguf(tmp_path, hf_folder("qwen2", tmp_path / "model"))
    (folder / "other.gguf").touch()
    with pytest.raises(ValueError, match=f"^model_dir={folder}: holds 2 GGUFs; leave one there"):
        gguf.complete(folder)
    (folder / "other.gguf").replace(folder / "model.gguf")
    with pytest.raises(ValueError, match=f"^{folder}/model.gguf: "):
        gguf.complete(folder)
    (folder / ".gguf.lock").unlink()
    (folder / ".gguf.lock").mkdir()
    with pytest.raises(ValueError, match=f"^model_dir={folder}, .* could not be written: Is a dir"):
        gguf.complete(folder)
    (folder / ".gguf.lock").rmdir()
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"^{folder}/model.gguf: needs `pip install gguf acc"):
        gguf.complete(folder)
