"""Sampled token ids -> the text that rewards see, whatever the policy sampled."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torchtune_grpo.trajectory import Samples


def decode_tokens(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decodes ids to text, special tokens included; an id that stands for nothing becomes U+FFFD.

    Models often have more output rows than their tokenizer has tokens, so that a policy can sample
    an id that no tokenizer can decode.
    """
    parameters = inspect.signature(tokenizer.decode).parameters
    options = {
        name: False for name in ("skip_special_tokens", "truncate_at_eos") if name in parameters
    }
    try:
        return tokenizer.decode(list(tokens), **options)
    except Exception:  # each tokenizer has its own error for an unknown id
        return _decode_known(tokenizer, tokens, options)


def _decode_known(tokenizer: Any, tokens: Sequence[int], options: dict[str, bool]) -> str:
    pieces = []
    for known, run in groupby(tokens, key=lambda token: _is_known(tokenizer, token, options)):
        ids = list(run)
        pieces.append(tokenizer.decode(ids, **options) if known else "\ufffd" * len(ids))
    return "".join(pieces)


def _is_known(tokenizer: Any, token: int, options: dict[str, bool]) -> bool:
    try:
        tokenizer.decode([token], **options)
    except Exception:
        return False
    return True


def decode_responses(
    tokenizer: Any, samples: Samples, *, stop_tokens: Sequence[int], prefill: str = ""
) -> list[str]:
    """Texts of sampled responses as rewards see them: the prefill, then what was sampled.

    A final stop token is not part of the text; ``prefill`` is what the prompt already holds.
    """
    texts = []
    rows = zip(samples.responses.tolist(), samples.lengths.tolist(), strict=True)
    for tokens, length in rows:
        tokens = tokens[:length]
        if tokens and tokens[-1] in stop_tokens:
            tokens = tokens[:-1]
        texts.append(prefill + decode_tokens(tokenizer, tokens))
    return texts
