"""Presets, golds and rewards on the real files of GSM8K and HumanEval, where there are any."""

import gzip
import json
import os
import re
import time
from pathlib import Path

import pytest
from rows import rows_of

from torchtune_grpo.data import gsm8k_dataset, humaneval_dataset
from torchtune_grpo.rewards import CodeReward, RewardSet, grade_math_answer
from torchtune_grpo.rewards.math import located_value

SHARED = Path(__file__).parents[2].parent / "shared"
GSM8K = Path(os.environ.get("TORCHTUNE_GRPO_GSM8K", SHARED / "gsm8k"))
HUMANEVAL = Path(os.environ.get("TORCHTUNE_GRPO_HUMANEVAL", SHARED / "humaneval"))
HUMANEVAL_FILE = HUMANEVAL / "HumanEval.jsonl.gz"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason="set TORCHTUNE_GRPO_GSM8K")
needs_humaneval = pytest.mark.skipif(
    not HUMANEVAL_FILE.is_file(), reason="set TORCHTUNE_GRPO_HUMANEVAL"
)
SPLITS = {"train": 7473, "test": 1319}
SHIPPED = "torchtune_grpo.rewards."
MATH = [
    {"_component_": SHIPPED + "math_correctness_reward"},
    {"_component_": SHIPPED + "CosineLengthReward", "max_length": 9},
    {"_component_": SHIPPED + "SymbolicMathReward"},
]
CODE = [
    {"_component_": SHIPPED + "CodeReward"},
    {"_component_": SHIPPED + "code_format_reward", "weight": 0.1},
]


def gsm8k_rows(split):
    text = (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@needs_gsm8k
@pytest.mark.parametrize(("split", "num_rows"), SPLITS.items())
def test_every_gold_of_gsm8k(llama3_tokenizer, split, num_rows):
    """Against a parse of its own: last line, four signs and a space cut off, as an integer."""
    pytest.importorskip("math_verify")
    data = gsm8k_dataset(llama3_tokenizer, source=str(GSM8K / f"{split}.jsonl"), split=split)
    raw = gsm8k_rows(split)
    assert len(data) == len(raw) == num_rows
    items = list(data)
    for row, item in zip(raw, items, strict=True):
        last_line = row["answer"].split("\n")[-1]
        assert last_line[:5] == "#### "
        assert int(item["columns"]["answer"]) == int(last_line[5:].replace(",", ""))
        assert item["columns"]["answer"].lstrip("-").isascii()
        assert item["columns"]["answer"].lstrip("-").isdigit()
        assert item["prompt"].text == row["question"] == item["columns"]["question"]
        assert "<<" not in item["prompt"].text + item["columns"]["solution"]
    start = time.process_time()
    RewardSet.from_config(MATH).check_data(data, key="dataset")
    assert time.process_time() - start < 5  # 0.6 s by itself, for three rewards and all rows
    given = rows_of(*raw[:1000])
    for node in MATH:  # the worked answers as they stand in the file are refused
        with pytest.raises(ValueError, match="1000 of 1000 rows"):
            RewardSet.from_config([node]).check_data(given, key="dataset")


@needs_gsm8k
def test_last_lines_of_worked_solutions_are_read():
    """Two thirds of them state one number."""
    rows = gsm8k_rows("train") + gsm8k_rows("test")
    read = right = 0
    for row in rows:
        solution, gold = row["answer"].split("\n#### ")
        last = re.sub("<<.*?>>", "", solution).splitlines()[-1]
        last = f"<think>It is 99.</think>\n<answer>{last}</answer>"
        read += located_value(last) is not None
        right += grade_math_answer(last, gold)
    assert len(rows) == 8792 and read > 0.68 * len(rows)
    assert read - right <= 9  # those whose last line states another number than the gold


@needs_humaneval
def test_every_real_solution_passes_and_an_empty_one_does_not(llama3_tokenizer):
    """All 164: as a base model continues the prompt, and as a chat model repeats it."""
    with gzip.open(HUMANEVAL_FILE, "rt") as file:
        rows = [json.loads(line) for line in file]
    data = humaneval_dataset(llama3_tokenizer, source=str(HUMANEVAL_FILE))
    rewards = RewardSet.from_config(CODE)
    rewards.check_data(data, key="dataset")
    rewards.close()
    columns = [data[index]["columns"] for index in range(len(data))]
    assert len(data) == 164
    arguments = {key: [c[key] for c in columns] for key in ("test", "entry_point", "setup")}
    solutions = [row["canonical_solution"] for row in rows]
    blocks = [f"```python\n{row['prompt']}{s}```" for row, s in zip(rows, solutions)]
    reward = CodeReward(workers=2, timeout=10)
    for completions, passed in ((solutions, 1.0), (blocks, 1.0), (["    pass\n"] * 164, 0.0)):
        assert reward(rows, completions, **arguments) == [passed] * 164
    reward.close()
