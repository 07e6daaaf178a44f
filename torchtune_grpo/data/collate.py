"""Puts the items of an `RLDataset` into one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PromptBatch:
    """B prompts.

    Attributes:
        tokens (list[list[int]]): B lists of token ids.
        indices (list[int]): B positions in the data set (``dataset[indices[b]]`` is prompt b).
        prompts (list[str]): B texts as rewards see them, without special tokens; those of a
            data set know all messages (:class:`~torchtune_grpo.data.prompt.Prompt`).
        columns (dict[str, list]): every other column of the data set, B values each.
        uses (list[int]): how often each has come in this step before, on any rank: it gets noise of
            its own each time.
        places (list[int]): among the step's prompts of all ranks, ascending.
    """

    tokens: list[list[int]]
    indices: list[int]
    prompts: list[str]
    columns: dict[str, list[Any]]
    uses: list[int]
    places: list[int]

    def first(self, count: int) -> PromptBatch:
        """The first ones of them."""
        return PromptBatch(
            tokens=self.tokens[:count],
            indices=self.indices[:count],
            prompts=self.prompts[:count],
            columns={name: values[:count] for name, values in self.columns.items()},
            uses=self.uses[:count],
            places=self.places[:count],
        )


def collate_prompts(
    items: Sequence[dict[str, Any]],
    *,
    uses: Sequence[int] | None = None,
    places: Sequence[int] | None = None,
) -> PromptBatch:
    """One batch of B items of an :class:`~torchtune_grpo.data.RLDataset`, in their order.

    ``uses`` and ``places`` are those of :class:`PromptBatch`; None = each comes for the first time,
    and no other rank has any.

    Raises:
        ValueError: if the items do not share the same columns.
    """
    assert items, "a data loader never asks for an empty batch"
    names = items[0]["columns"].keys()
    for item in items:
        if item["columns"].keys() != names:
            raise ValueError(
                f"Rows of one batch have different columns: row {items[0]['index']} has "
                f"{sorted(names)}, row {item['index']} has {sorted(item['columns'])}. "
                "Give joined data sets the same columns through their `columns` keys."
            )
    return PromptBatch(
        tokens=[item["tokens"] for item in items],
        indices=[item["index"] for item in items],
        prompts=[item["prompt"] for item in items],
        columns={name: [item["columns"][name] for item in items] for name in names},
        uses=[0] * len(items) if uses is None else [*uses],
        places=[*range(len(items))] if places is None else [*places],
    )
