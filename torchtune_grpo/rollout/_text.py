"""Sampled token ids -> the text that rewards see, whatever the policy sampled."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torchtune_grpo.trajectory import Samples


def decode_tokens(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decodes ids to text, special tokens included; an id that stands for nothing becomes U+FFFD.

    Models often have more output rows than their tokenizer has tokens, so that a policy can sample
    an id that no tokenizer can decode.

    Args:
        tokenizer (Any): a torchtune tokenizer.
        tokens (Sequence[int]): without the stop token.

    Returns:
        str: the text.
    """
    options: dict[str, bool] = {}
    parameters = inspect.signature(tokenizer.decode).parameters
    if "skip_special_tokens" in parameters:
        options["skip_special_tokens"] = False
    if "truncate_at_eos" in parameters:
        options["truncate_at_eos"] = False
    try:
        return tokenizer.decode(list(tokens), **options)
    except Exception:  # each tokenizer has its own error for an unknown id
        return _decode_known(tokenizer, list(tokens), options)


def _decode_known(tokenizer: Any, tokens: list[int], options: dict[str, bool]) -> str:
    pieces: list[str] = []
    run: list[int] = []
    for token in [*tokens, None]:
        known = token is not None and _is_known(tokenizer, token, options)
        if token is not None and known:
            run.append(token)
            continue
        pieces.append(tokenizer.decode(run, **options) if run else "")
        run = []
        pieces.append("\ufffd" if token is not None else "")
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

    Args:
        tokenizer (Any): a torchtune tokenizer.
        samples (Samples): N rows.
        stop_tokens (Sequence[int]): the final stop token is not part of the text.
        prefill (str): the beginning of the answer that the prompt already holds.

    Returns:
        list[str]: N texts.
    """
    texts = []
    rows = zip(samples.responses.tolist(), samples.lengths.tolist(), strict=True)
    for tokens, length in rows:
        tokens = tokens[:length]
        if tokens and tokens[-1] in stop_tokens:
            tokens = tokens[:-1]
        texts.append(prefill + decode_tokens(tokenizer, tokens))
    return texts
