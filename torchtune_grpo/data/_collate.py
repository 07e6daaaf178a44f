"""Puts the items of an `RLDataset` into one left-padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class PromptBatch:
    """B prompts; P is the length of the longest one in tokens.

    Attributes:
        tokens: int64 ``[B, P]``, left-padded: row b's prompt is ``tokens[b, P - lengths[b]:]``.
        lengths: int64 ``[B]``, real prompt lengths. The only source for masks: a prompt may hold
            the pad id as a real token.
        indices: int64 ``[B]``, positions in the data set (``dataset[indices[b]]`` is row b).
        prompts: B texts as rewards see them, without special tokens.
        columns: every other column of the data set, B values each.
    """

    tokens: Tensor
    lengths: Tensor
    indices: Tensor
    prompts: list[str]
    columns: dict[str, list[Any]]

    def to(self, device: torch.device | str) -> PromptBatch:
        """Returns the batch with its tensors on ``device``."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            lengths=self.lengths.to(device),
            indices=self.indices.to(device),
        )


def collate_prompts(items: Sequence[dict[str, Any]], *, pad_id: int) -> PromptBatch:
    """Left-pads prompts, so that every row's response starts in the same column.

    Args:
        items: B items of an :class:`~torchtune_grpo.data.RLDataset`.
        pad_id: the tokenizer's pad id. Padding is masked wherever it is used, so only its being a
            valid embedding index matters: a negative id (SentencePiece's "no pad token" is -1)
            becomes 0.

    Returns:
        A :class:`PromptBatch`.

    Raises:
        ValueError: if the tokenizer has no pad id, or the items do not share the same columns.
    """
    assert items, "a data loader never asks for an empty batch"
    if pad_id is None:
        raise ValueError(
            "tokenizer.pad_id is None, but prompts of different lengths need padding. "
            "Give the tokenizer a pad_token."
        )
    names = items[0]["columns"].keys()
    for item in items:
        if item["columns"].keys() != names:
            raise ValueError(
                f"Rows of one batch have different columns: row {items[0]['index']} has "
                f"{sorted(names)}, row {item['index']} has {sorted(item['columns'])}. "
                "Give joined data sets the same columns through their `columns` keys."
            )
    lengths = torch.tensor([len(item["tokens"]) for item in items])  # [B]
    width = int(lengths.max())
    tokens = torch.full((len(items), width), max(pad_id, 0))  # [B, P]
    for row, item in zip(tokens, items, strict=True):
        row[width - len(item["tokens"]) :] = torch.tensor(item["tokens"])
    return PromptBatch(
        tokens=tokens,
        lengths=lengths,
        indices=torch.tensor([item["index"] for item in items]),
        prompts=[item["prompt"] for item in items],
        columns={name: [item["columns"][name] for item in items] for name in names},
    )
