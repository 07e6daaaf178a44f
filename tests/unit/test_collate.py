"""A batch of prompts keeps the order of its items and every column."""

from __future__ import annotations

from typing import Any

import pytest

from torchtune_grpo.data import PromptBatch, collate_prompts


def item(index: int, tokens: list[int], **columns: Any) -> dict[str, Any]:
    return {"index": index, "tokens": tokens, "prompt": f"text {index}", "columns": columns}


def test_every_field_is_in_the_order_of_the_items() -> None:
    items = [item(4, [5, 6], answer="7", tags=["a"]), item(2, [7], answer=None, tags=[])]
    assert collate_prompts(items) == PromptBatch(
        tokens=[[5, 6], [7]],
        indices=[4, 2],
        prompts=["text 4", "text 2"],
        columns={"answer": ["7", None], "tags": [["a"], []]},
        uses=[0, 0],
        places=[0, 1],
    )


def test_rows_with_different_columns_are_refused() -> None:
    for columns in ({"gold": "1"}, {}, {"answer": "1", "gold": "1"}):
        with pytest.raises(ValueError, match="row 3 has .*row 8 has"):
            collate_prompts([item(3, [1], answer="7"), item(8, [2], **columns)])
