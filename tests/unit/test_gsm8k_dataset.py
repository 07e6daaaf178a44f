"""GSM8K: question -> prompt, gold without commas, worked answer without calculator notes."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from torchtune_grpo.data import gsm8k_dataset

DEFAULT_DIR = Path(__file__).parents[2].parent / "shared" / "gsm8k"
REAL_DIR = Path(os.environ.get("TORCHTUNE_GRPO_GSM8K", DEFAULT_DIR))
ROWS = [
    {
        "question": "Ann has 48/2 clips. How many?",
        "answer": "48/2 = <<48/2=24>>24 clips.\nSo $<<24*1=24>>24.\n#### 24",
    },
    {"question": "How many?", "answer": "Mark a #### b first.\n#### -1,234,567 "},
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def gsm8k_file(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "rows.jsonl", ROWS)


def load(tokenizer: Any, data_files: str, **options: Any) -> Any:
    return gsm8k_dataset(tokenizer, source="json", data_files=data_files, **options)


def test_columns_hold_gold_and_worked_answer(llama3_tokenizer: Any, gsm8k_file: str) -> None:
    first, second = load(llama3_tokenizer, gsm8k_file)
    assert first["prompt"] == ROWS[0]["question"]
    assert first["columns"] == {
        "question": ROWS[0]["question"],
        "answer": "24",
        "solution": "48/2 = 24 clips.\nSo $24.",
    }
    assert second["columns"]["answer"] == "-1234567"
    assert second["columns"]["solution"] == "Mark a #### b first."


def test_the_prompt_asks_for_both_tags_and_can_end_in_a_prefill(
    llama3_tokenizer: Any, gsm8k_file: str
) -> None:
    data = load(llama3_tokenizer, gsm8k_file, prefill="<think>")
    text = llama3_tokenizer.decode(data[0]["tokens"], skip_special_tokens=False)
    system, user, reply = text.split("<|start_header_id|>")[1:]
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert tag in system
    assert user == f"user<|end_header_id|>\n\n{ROWS[0]['question']}<|eot_id|>"
    assert reply == "assistant<|end_header_id|>\n\n<think>"
    assert data.prefill == "<think>"


def test_calculator_notes_reach_no_prompt(llama3_tokenizer: Any, gsm8k_file: str) -> None:
    template = "{question}\n{solution}"
    data = load(llama3_tokenizer, gsm8k_file, prompt_template=template)
    assert "<<" not in data[0]["prompt"] and "So $24." in data[0]["prompt"]


def test_a_file_holds_the_split_that_is_asked_for(llama3_tokenizer: Any, gsm8k_file: str) -> None:
    assert len(load(llama3_tokenizer, gsm8k_file, split="test")) == 2
    assert len(load(llama3_tokenizer, gsm8k_file, split="test[:1]")) == 1
    assert [*gsm8k_dataset(llama3_tokenizer, source=gsm8k_file, split="test")] == [
        *load(llama3_tokenizer, gsm8k_file)
    ]


@pytest.mark.parametrize("answer", ["72", "so it is ####72", "#### ", "#### ,"])
def test_an_answer_without_gold_is_left_out(
    llama3_tokenizer: Any, tmp_path: Path, answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {"question": "q", "answer": answer}
    with caplog.at_level(logging.INFO):
        data = load(llama3_tokenizer, write_jsonl(tmp_path / "bad.jsonl", [*ROWS, bad]))
    assert data.row_numbers == [0, 1]
    assert (
        "1 of 3 rows (counted from 0) are left out: answer does not end in '#### '" in caplog.text
    )


def test_other_data_is_refused_with_its_columns(llama3_tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "other.jsonl", [{"problem": "q", "answer": "#### 1"}])
    with pytest.raises(ValueError, match="it has no column 'question', but .*'problem'"):
        load(llama3_tokenizer, path)


@pytest.mark.skipif(not REAL_DIR.is_dir(), reason="set TORCHTUNE_GRPO_GSM8K to GSM8K's folder")
@pytest.mark.parametrize(("split", "num_rows"), [("train", 7473), ("test", 1319)])
def test_every_gold_of_the_real_files(llama3_tokenizer: Any, split: str, num_rows: int) -> None:
    """Against a parse of its own: last line, four signs and a space cut off, as an integer."""
    path = REAL_DIR / f"{split}.jsonl"
    data = load(llama3_tokenizer, str(path), split=split)
    raw = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(data) == len(raw) == num_rows
    for row, item in zip(raw, data, strict=True):
        last_line = row["answer"].split("\n")[-1]
        assert last_line[:5] == "#### "
        assert int(item["columns"]["answer"]) == int(last_line[5:].replace(",", ""))
        assert item["columns"]["answer"].lstrip("-").isascii()
        assert item["columns"]["answer"].lstrip("-").isdigit()
        assert item["prompt"] == row["question"] == item["columns"]["question"]
        assert "<<" not in item["prompt"] + item["columns"]["solution"]
