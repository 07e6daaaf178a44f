"""Rows of GSM8K and HumanEval; our own problems, which are right and whose splits are apart.

Presets are checked like the class they are of.
"""

import json
import logging
import math
import re
from collections import Counter

import pytest
from omegaconf import OmegaConf
from rows import Bytes
from runs import humaneval

import torchtune_grpo.data
from torchtune_grpo.config.check import check_component
from torchtune_grpo.data import arithmetic_dataset, gsm8k_dataset, humaneval_dataset, number_dataset
from torchtune_grpo.data.presets import LEVELS

PROBLEMS = [
    {
        "question": "Ann has 48/2 clips. How many?",
        "answer": "48/2 = <<48/2=24>>24 clips.\nSo $<<24*1=24>>24.\n#### 24",
    },
    {"question": "How many?", "answer": "Mark a #### b first.\n#### -1,234,567 "},
]
FUNCTION = humaneval(0)
PRESETS = ["gsm8k_dataset", "humaneval_dataset", "arithmetic_dataset"]


@pytest.fixture
def load(llama3_tokenizer, tmp_path):
    def load(preset, rows, **options):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return preset(llama3_tokenizer, source="json", data_files=str(path), **options)

    return load


def test_columns_hold_gold_and_worked_answer(load, llama3_tokenizer):
    """And the prompt asks for both tags."""
    first, second = load(gsm8k_dataset, PROBLEMS)
    question = PROBLEMS[0]["question"]
    solution = "48/2 = 24 clips.\nSo $24."
    assert first["prompt"].text == question
    text = llama3_tokenizer.decode(first["tokens"])
    assert all(tag in text for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    assert first["columns"] == {"question": question, "answer": "24", "solution": solution}
    assert second["columns"]["answer"] == "-1234567"
    assert second["columns"]["solution"] == "Mark a #### b first."
    item = load(gsm8k_dataset, PROBLEMS, prompt_template="{question}\n{solution}")[0]
    assert "<<" not in item["prompt"].text and "So $24." in item["prompt"].text


@pytest.mark.parametrize("answer", ["so it is ####72", "#### ,"])
def test_an_answer_without_gold_is_left_out(load, answer, caplog):
    with caplog.at_level(logging.INFO):
        data = load(gsm8k_dataset, [*PROBLEMS, {"question": "q", "answer": answer}])
    assert [*data.row_numbers] == [0, 1]
    assert (
        "1 of 3 rows (counted from 0) are left out: answer does not end in '#### '" in caplog.text
    )


def test_a_humaneval_item_holds_the_test_and_not_the_solution(load, llama3_tokenizer):
    data = load(humaneval_dataset, [FUNCTION])
    assert data[0]["prompt"].text == FUNCTION["prompt"]
    expected = {name: FUNCTION[name] for name in ("task_id", "test", "entry_point")}
    assert data[0]["columns"] == {**expected, "setup": FUNCTION["prompt"]}
    text = llama3_tokenizer.decode(data[0]["tokens"], skip_special_tokens=False)
    assert "```python" in text and "canonical" not in text
    rows = [FUNCTION, {**FUNCTION, "task_id": "Test/1"}]
    for split, expected in [("test[:1]", ["Test/0"]), ("test[1:]", ["Test/1"])]:
        data = load(humaneval_dataset, rows, split=split)
        assert [item["columns"]["task_id"] for item in data] == expected


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_is_checked_against_the_arguments_of_the_class(name):
    component = f"torchtune_grpo.data.{name}"
    node = OmegaConf.create({"_component_": component, "max_prompt_tokens": "x", "chat": 3})
    with pytest.raises(ValueError) as raised:
        check_component("dataset", node)
    for key in ("max_prompt_tokens='x'", "chat=3"):
        assert f"dataset.{key}: should be " in str(raised.value)


@pytest.mark.parametrize("name", ["RLDataset", *PRESETS[:2]])
def test_a_misspelt_key_gets_the_nearest_before_the_hub_is_asked(llama3_tokenizer, name):
    preset = getattr(torchtune_grpo.data, name)
    for key in ("promt_column", "data_file", "max_promt_tokens"):
        with pytest.raises(ValueError, match=f"^{key}='x': .*Did you mean "):
            preset(llama3_tokenizer, source="no_such/name", **{key: "x"})
    with pytest.raises(ValueError, match="^sed=1: unknown argument"):
        arithmetic_dataset(llama3_tokenizer, levels=1, split="train", num_samples=2, sed=1)


# --- Shipped and generated problems -----------------------------------------------------------

ACTS = {"finds": "+", "buys": "+", "gets": "+", "wins": "+"}
ACTS |= {"loses": "-", "sells": "-", "gives away": "-", "lends out": "-"}


def answer_from_question(question: str) -> int:
    """Reads the question alone, as a pupil would: an oracle that shares no code with the maker."""
    if question.startswith("What is "):
        return eval(question.removeprefix("What is ").removesuffix("?"))  # our own digits and signs
    story = question.split(". How many")[0]
    first = re.search(r"has (\d+) (?:\w+ of (\d+) )?", story)
    value = int(first[1]) * int(first[2] or 1)
    acts = "|".join(ACTS)
    for act, number, friends in re.findall(rf"({acts}) (\d+)|among (\d+) friends", story):
        if friends:
            assert value % int(friends) == 0
            value //= int(friends)
        else:
            value += int(number) if ACTS[act] == "+" else -int(number)
    return value


def test_answers_and_worked_steps_are_right_and_the_splits_apart():
    """Of all shipped rows; a sum is not in both splits, in whatever order of its terms."""
    seen: dict[str, set] = {}
    for split, count in (("train", 10_000), ("test", 1100)):
        data = arithmetic_dataset(Bytes(), levels=[*LEVELS], split=split, chat=False)
        assert len(data) == len({item["prompt"].text for item in data}) == count
        assert [item["columns"]["level"] for item in data][:16] == [*LEVELS] * 2
        seen[split] = set()
        for item in data:
            question, row = item["prompt"].text, item["columns"]
            assert int(row["answer"]) == answer_from_question(question), row
            *lines, last = row["solution"].split("\n")
            assert last == f"#### {row['answer']}" and lines[-1].endswith(f"={row['answer']}")
            for line in lines:
                left, right = line.split("=")
                assert eval(left) == int(right) >= 0, line
            terms = re.findall(r"[+-]?\d+", question.replace(" ", "").replace("is", "+"))
            seen[split].add(question if row["level"] > 4 else tuple(sorted(terms)))
    assert not seen["train"] & seen["test"]


def test_levels_take_turns_while_they_last():
    def counts(**given):
        data = arithmetic_dataset(Bytes(), chat=False, **given)
        return Counter(item["columns"]["level"] for item in data)

    expected = {1: 80, 2: 460, 3: 460}
    assert counts(levels=[1, 2, 3], split="train", num_samples=1000) == expected
    assert counts(levels=8, split="test") == {8: 100}
    for bad in (9, [], [1, 0]):
        with pytest.raises(ValueError, match=re.escape(f"levels={bad}: give some of [1, 2,")):
            counts(levels=bad, split="test")


@pytest.mark.parametrize("task", ["largest", "product", "long_product", "sum"])
def test_questions_about_numbers_are_right_and_held_out(llama3_tokenizer, task):
    """Also in another order of the numbers."""
    solve = {"largest": max, "product": math.prod, "long_product": math.prod, "sum": sum}[task]
    numbers: dict[str, set] = {}
    for split, count in (("train", 80), ("test", 20)):
        data = number_dataset(llama3_tokenizer, task=task, split=split, num_samples=count)
        numbers[split] = set()
        for item in (data[i] for i in range(len(data))):
            row = item["columns"]
            drawn = [*map(int, re.findall("[0-9]+", item["prompt"].text))]
            assert row["answer"] == str(solve(drawn))
            numbers[split].add(tuple(sorted(drawn)))
        assert len({data[i]["prompt"].text for i in range(count)}) == count
    assert not numbers["train"] & numbers["test"]


def test_more_products_than_there_are_is_an_error(llama3_tokenizer):
    with pytest.raises(ValueError, match="num_samples=200: task=product has only .* split train"):
        number_dataset(llama3_tokenizer, task="product", split="train", num_samples=200)
