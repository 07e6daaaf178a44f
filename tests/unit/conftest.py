"""Tiny tokenizers of every family that torchtune knows, made on the spot.

In those of the Llama 3 and Qwen families a text's tokens are its UTF-8 bytes, so that tests can
write down what they expect. Special tokens have ids from 256 on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import sentencepiece
from checkpoints import LLAMA_SPECIALS, QWEN_SPECIALS, llama_tokenizer_files, qwen_tokenizer_files
from torchtune.models.gemma import GemmaTokenizer
from torchtune.models.llama2 import Llama2Tokenizer
from torchtune.models.llama3 import Llama3Tokenizer
from torchtune.models.mistral import MistralTokenizer
from torchtune.models.phi3 import Phi3MiniTokenizer
from torchtune.models.qwen2 import Qwen2Tokenizer
from torchtune.models.qwen2_5._tokenizer import Qwen2_5Tokenizer


@pytest.fixture(scope="session", autouse=True)
def datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the files of tests out of the user's cache of data sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        # tiktoken caches a file under its path and would not see that it has changed.
        patch.setenv("TIKTOKEN_CACHE_DIR", "")
        yield tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="session")
def llama3_tokenizer(tokenizer_dir: Path) -> Llama3Tokenizer:
    llama_tokenizer_files(tokenizer_dir)
    special_tokens = {name: 256 + i for i, name in enumerate(LLAMA_SPECIALS)}
    path = str(tokenizer_dir / "tokenizer.model")
    return Llama3Tokenizer(path, special_tokens=special_tokens)


@pytest.fixture(scope="session")
def qwen_files(tokenizer_dir: Path) -> dict[str, Any]:
    vocab, merges = tokenizer_dir / "vocab.json", tokenizer_dir / "merges.txt"
    qwen_tokenizer_files(tokenizer_dir)
    special_tokens = {name: 256 + i for i, name in enumerate(QWEN_SPECIALS)}
    return {"path": str(vocab), "merges_file": str(merges), "special_tokens": special_tokens}


@pytest.fixture(scope="session")
def qwen2_tokenizer(qwen_files: dict[str, Any]) -> Qwen2Tokenizer:
    return Qwen2Tokenizer(**qwen_files)


@pytest.fixture(scope="session")
def qwen2_5_tokenizer(qwen_files: dict[str, Any]) -> Qwen2_5Tokenizer:
    return Qwen2_5Tokenizer(**qwen_files)


@pytest.fixture(scope="session")
def sentencepiece_tokenizers(tokenizer_dir: Path) -> dict[str, Any]:
    """Make sentencepiece tokenizers, which all but Gemma's put a space before a text."""
    words = "what is the sum of these numbers think step by answer reply INST SYS user"
    for add_dummy_prefix in (True, False):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([words] * 20),
            model_prefix=str(tokenizer_dir / f"prefix_{add_dummy_prefix}"),
            model_type="bpe",
            vocab_size=330,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=add_dummy_prefix,
            minloglevel=2,
        )
    prefixed, plain = (str(tokenizer_dir / f"prefix_{each}.model") for each in (True, False))
    return {
        "llama2": Llama2Tokenizer(prefixed),
        "mistral": MistralTokenizer(prefixed),
        "phi3": Phi3MiniTokenizer(prefixed),
        "gemma": GemmaTokenizer(plain),
    }
