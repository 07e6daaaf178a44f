"""Left padding: prompts end in the last column; only lengths tell padding from tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchtune_grpo.data import collate_prompts


def item(index: int, tokens: list[int], **columns: Any) -> dict[str, Any]:
    return {"index": index, "tokens": tokens, "prompt": f"text {index}", "columns": columns}


def test_prompts_are_padded_on_the_left() -> None:
    batch = collate_prompts([item(4, [5, 6]), item(2, [7, 8, 9]), item(9, [3])], pad_id=1)
    assert torch.equal(batch.tokens, torch.tensor([[1, 5, 6], [7, 8, 9], [1, 1, 3]]))
    assert torch.equal(batch.lengths, torch.tensor([2, 3, 1]))
    assert torch.equal(batch.indices, torch.tensor([4, 2, 9]))
    assert batch.tokens.dtype == batch.lengths.dtype == batch.indices.dtype == torch.int64
    assert batch.prompts == ["text 4", "text 2", "text 9"]


def test_a_prompt_that_holds_the_pad_id_keeps_its_length() -> None:
    batch = collate_prompts([item(0, [0, 0, 5, 0]), item(1, [0])], pad_id=0)
    assert batch.lengths.tolist() == [4, 1]
    assert batch.tokens.tolist() == [[0, 0, 5, 0], [0, 0, 0, 0]]


def test_a_negative_pad_id_still_gives_valid_embedding_indices() -> None:
    batch = collate_prompts([item(0, [5, 6]), item(1, [7])], pad_id=-1)
    assert batch.tokens.tolist() == [[5, 6], [0, 7]]


def test_columns_become_lists_in_the_order_of_the_rows() -> None:
    batch = collate_prompts(
        [item(0, [1], answer="7", tags=["a"]), item(1, [2], answer=None, tags=[])], pad_id=0
    )
    assert batch.columns == {"answer": ["7", None], "tags": [["a"], []]}


def test_rows_with_different_columns_are_refused() -> None:
    for columns in ({"gold": "1"}, {}, {"answer": "1", "gold": "1"}):
        with pytest.raises(ValueError, match="row 3 has .*row 8 has"):
            collate_prompts([item(3, [1], answer="7"), item(8, [2], **columns)], pad_id=0)


def test_a_tokenizer_without_pad_id_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer.pad_id"):
        collate_prompts([item(0, [1])], pad_id=None)  # type: ignore[arg-type]


def test_to_moves_the_tensors_and_keeps_the_rest() -> None:
    batch = collate_prompts([item(0, [5, 6], answer="7")], pad_id=0)
    moved = batch.to("meta")
    assert {moved.tokens.device.type, moved.lengths.device.type, moved.indices.device.type} == {
        "meta"
    }
    assert (moved.prompts, moved.columns) == (batch.prompts, batch.columns)
    assert batch.tokens.device.type == "cpu"
