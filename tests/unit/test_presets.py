"""GSM8K and HumanEval: what their rows become; presets are checked like the class they are of."""

import gzip
import json
import logging
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import torchtune_grpo.data
from torchtune_grpo.config.check import check_component
from torchtune_grpo.data import RLDataset, arithmetic_dataset, gsm8k_dataset, humaneval_dataset
from torchtune_grpo.rewards import CodeReward

SHARED = Path(__file__).parents[2].parent / "shared"
GSM8K = Path(os.environ.get("TORCHTUNE_GRPO_GSM8K", SHARED / "gsm8k"))
HUMANEVAL = Path(os.environ.get("TORCHTUNE_GRPO_HUMANEVAL", SHARED / "humaneval"))
HUMANEVAL_FILE = HUMANEVAL / "HumanEval.jsonl.gz"
PROBLEMS = [
    {
        "question": "Ann has 48/2 clips. How many?",
        "answer": "48/2 = <<48/2=24>>24 clips.\nSo $<<24*1=24>>24.\n#### 24",
    },
    {"question": "How many?", "answer": "Mark a #### b first.\n#### -1,234,567 "},
]
FUNCTION = {
    "task_id": "Test/0",
    "prompt": 'def add(x: int) -> int:\n    """Adds one."""\n',
    "entry_point": "add",
    "canonical_solution": "    return x + 1\n",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
}
PRESETS = ["gsm8k_dataset", "humaneval_dataset", "arithmetic_dataset"]


@pytest.fixture
def load(llama3_tokenizer, tmp_path):
    def load(preset, rows, **options):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return preset(llama3_tokenizer, source="json", data_files=str(path), **options)

    return load


def test_columns_hold_gold_and_worked_answer(load):
    first, second = load(gsm8k_dataset, PROBLEMS)
    question = PROBLEMS[0]["question"]
    solution = "48/2 = 24 clips.\nSo $24."
    assert first["prompt"] == question
    assert first["columns"] == {"question": question, "answer": "24", "solution": solution}
    assert second["columns"]["answer"] == "-1234567"
    assert second["columns"]["solution"] == "Mark a #### b first."


def test_the_prompt_asks_for_both_tags_and_can_end_in_a_prefill(load, llama3_tokenizer):
    data = load(gsm8k_dataset, PROBLEMS, prefill="<think>")
    text = llama3_tokenizer.decode(data[0]["tokens"], skip_special_tokens=False)
    system, user, reply = text.split("<|start_header_id|>")[1:]
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert tag in system
    assert user == f"user<|end_header_id|>\n\n{PROBLEMS[0]['question']}<|eot_id|>"
    assert reply == "assistant<|end_header_id|>\n\n<think>"


def test_calculator_notes_reach_no_prompt(load):
    data = load(gsm8k_dataset, PROBLEMS, prompt_template="{question}\n{solution}")
    assert "<<" not in data[0]["prompt"] and "So $24." in data[0]["prompt"]


@pytest.mark.parametrize("answer", ["72", "so it is ####72", "#### ", "#### ,"])
def test_an_answer_without_gold_is_left_out(load, answer, caplog):
    with caplog.at_level(logging.INFO):
        data = load(gsm8k_dataset, [*PROBLEMS, {"question": "q", "answer": answer}])
    assert data.row_numbers == [0, 1]
    assert (
        "1 of 3 rows (counted from 0) are left out: answer does not end in '#### '" in caplog.text
    )


@pytest.mark.parametrize(
    ("preset", "missing"), [(gsm8k_dataset, "question"), (humaneval_dataset, "task_id")]
)
def test_other_data_is_refused_with_its_columns(load, preset, missing):
    with pytest.raises(ValueError, match=f"it has no column '{missing}', but .'answer', 'prob"):
        load(preset, [{"problem": "q", "answer": "#### 1"}])


def test_the_item_holds_the_test_and_not_the_solution(load, llama3_tokenizer):
    data = load(humaneval_dataset, [FUNCTION])
    assert data[0]["prompt"] == FUNCTION["prompt"]
    expected = {name: FUNCTION[name] for name in ("task_id", "test", "entry_point")}
    assert data[0]["columns"] == {**expected, "setup": FUNCTION["prompt"]}
    text = llama3_tokenizer.decode(data[0]["tokens"], skip_special_tokens=False)
    assert "```python" in text and "canonical" not in text


def test_slices_leave_problems_for_evaluation(load):
    rows = [FUNCTION, {**FUNCTION, "task_id": "Test/1"}]
    for split, expected in [("test[:1]", ["Test/0"]), ("test[1:]", ["Test/1"])]:
        data = load(humaneval_dataset, rows, split=split)
        assert [item["columns"]["task_id"] for item in data] == expected
    assert len(load(humaneval_dataset, rows)) == 2


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_is_checked_against_the_arguments_of_the_class(name):
    component = f"torchtune_grpo.data.{name}"
    node = OmegaConf.create({"_component_": component, "max_prompt_tokens": "x", "chat": 3})
    with pytest.raises(ValueError) as raised:
        check_component("dataset", node)
    for key in ("max_prompt_tokens='x'", "chat=3"):
        assert f"dataset.{key}: should be a valid " in str(raised.value)


@pytest.mark.parametrize(
    "key", ["promt_column", "data_file", "column", "sources", "max_promt_tokens"]
)
@pytest.mark.parametrize("name", ["RLDataset", *PRESETS[:2]])
def test_a_misspelt_key_gets_the_nearest_before_the_hub_is_asked(llama3_tokenizer, name, key):
    with pytest.raises(ValueError, match=f"^{key}='x': .*Did you mean "):
        getattr(torchtune_grpo.data, name)(llama3_tokenizer, source="no_such/name", **{key: "x"})


def test_a_misspelt_key_of_data_that_is_made(llama3_tokenizer):
    with pytest.raises(ValueError, match="^sed=1: unknown argument"):
        arithmetic_dataset(llama3_tokenizer, levels=1, split="train", num_samples=2, sed=1)
    with pytest.raises(ValueError, match="^sed=1: unknown argument"):
        RLDataset(llama3_tokenizer, rows=[{"prompt": "a"}], sed=1)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="set TORCHTUNE_GRPO_GSM8K to GSM8K's folder")
@pytest.mark.parametrize(("split", "num_rows"), [("train", 7473), ("test", 1319)])
def test_every_gold_of_the_real_files(llama3_tokenizer, split, num_rows):
    """Against a parse of its own: last line, four signs and a space cut off, as an integer."""
    path = GSM8K / f"{split}.jsonl"
    data = gsm8k_dataset(llama3_tokenizer, source=str(path), split=split)
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


@pytest.mark.skipif(not HUMANEVAL_FILE.exists(), reason="no HumanEval file here")
def test_every_real_solution_passes_and_an_empty_one_does_not(llama3_tokenizer):
    """All 164: as a base model continues the prompt, and as a chat model repeats it."""
    with gzip.open(HUMANEVAL_FILE, "rt") as file:
        rows = [json.loads(line) for line in file]
    data = humaneval_dataset(llama3_tokenizer, source=str(HUMANEVAL_FILE))
    columns = [data[index]["columns"] for index in range(len(data))]
    assert len(data) == 164
    arguments = {key: [c[key] for c in columns] for key in ("test", "entry_point", "setup")}
    solutions = [row["canonical_solution"] for row in rows]
    blocks = [f"```python\n{row['prompt']}{s}```" for row, s in zip(rows, solutions)]
    reward = CodeReward(workers=2, timeout=10)
    for completions, passed in ((solutions, 1.0), (blocks, 1.0), (["    pass\n"] * 164, 0.0)):
        assert reward(rows, completions, **arguments) == [passed] * 164
    reward.close()
