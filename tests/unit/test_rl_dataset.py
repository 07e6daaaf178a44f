"""RLDataset: rows in, prompt tokens and reward columns out; every bad key or row is named."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import socket
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pandas
import pytest
from hf_tokenizers import write_tokenizer

from torchtune_grpo.data import RLDataset
from torchtune_grpo.data.chat import PromptEncoder
from torchtune_grpo.data.load import digest
from torchtune_grpo.models.tokenizer import HFTokenizer
from torchtune_grpo.rewards import Reward, RewardSet, math_correctness_reward
from torchtune_grpo.trajectory import Prompt

ROWS = [
    {"prompt": "1+1?", "answer": "2", "level": 1},
    {"prompt": "twelve times twelve?", "answer": "144", "level": 3},
    {"prompt": "2+3?", "answer": "5", "level": 1},
]
BRACES = r"\boxed{} {answer} {0} {{level}} {prompt.__class__} }{"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """For local files need none; `datasets` would count their uses at its makers', if it could."""

    def refuse(*args, **kwargs):
        raise OSError("there is no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def make(tokenizer: Any, rows: Any = ROWS, **options: Any) -> RLDataset:
    return RLDataset(tokenizer, rows=rows, **options)


def chat(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in turns]


# Items


def test_an_item_holds_tokens_text_and_the_other_columns(llama3_tokenizer):
    data = make(llama3_tokenizer, chat=False, prefill="<think>")
    assert len(data) == 3
    assert data[1] == {
        "index": 1,
        "tokens": [llama3_tokenizer.bos_id, *b"twelve times twelve?<think>"],
        "prompt": Prompt.of("twelve times twelve?"),
        "columns": {"answer": "144", "level": 3},
    }
    assert data.prefill == "<think>"


def test_positions_count_from_both_ends_and_items_are_copies(llama3_tokenizer):
    data = make(llama3_tokenizer, system_prompt="Be brief.")
    assert data[-1] == data[2] and [item["index"] for item in data] == [0, 1, 2]
    before, changed = list(pickle.loads(pickle.dumps(data))), data[0]
    changed["tokens"].append(-7)
    changed["columns"]["answer"] = "wrong"
    assert list(data) == before
    expected = chat(("system", "Be brief."), ("user", "1+1?"))
    assert data[0]["prompt"].messages == expected


# Templates


def test_templates_and_columns(llama3_tokenizer):
    """Braces in the data are only text."""

    def item_of(row, **options):
        (item,) = make(llama3_tokenizer, [{"prompt": "1+1?", **row}], **options)
        return item["prompt"].text, item["columns"]

    found = item_of({"n": 3}, prompt_template="({n}) {prompt} {{x}}")
    assert found == ("(3) 1+1? {x}", {"n": 3})
    assert item_of({"prompt": BRACES}, prompt_template="{prompt}!") == (BRACES + "!", {})
    found = item_of({"q": "2+2?"}, prompt_template="Q: {prompt}", prompt_column="q")
    assert found == ("Q: 2+2?", {"prompt": "1+1?"})
    columns = {"answer": "gold", "solution": "answer", "problem": "prompt"}
    found = item_of({"answer": 1, "gold": 2}, columns=columns)
    assert found == ("1+1?", {"answer": 2, "solution": 1, "problem": "1+1?"})
    found = item_of({"q": {"text": "2+2?"}}, prompt_column="q.text")
    assert found == ("2+2?", {"prompt": "1+1?", "q": {"text": "2+2?"}})
    verl = [{"prompt": "1+1?", "reward_model": own} for own in ({"ground_truth": "2"}, None)]
    data = make(llama3_tokenizer, verl, columns={"answer": "reward_model.ground_truth"})
    assert [item["columns"]["answer"] for item in data] == ["2"]  # the other row is left out
    with pytest.raises(ValueError, match="columns: there is no column 'reward_model.gold' among"):
        item_of({"reward_model": {}}, columns={"answer": "reward_model.gold"})
    choices = {"choices": ["red {n}", 7]}
    found, _ = item_of(choices, prompt_template="{prompt}\n{choices}\n({choices:, })")
    assert found == "1+1?\nred {n}\n7\n(red {n}, 7)"
    with pytest.raises(ValueError, match="column 'n' is not text, a number or a list of these: "):
        item_of({"n": [[1]]}, prompt_template="{n}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_template": "{level.real}"}, "'level.real'"),
        ({"prompt_template": r"{prompt} \boxed{"}, r"\{\{ and \}\}"),
        ({"prompt_template": r"{prompt} \boxed{}"}, r"\{\} is no column.*\{\{ and \}\}"),
        ({"prompt_template": '{prompt} {"a": 1}'}, r"\{\"a\"\} is no column.*\{\{ and \}\}"),
        ({"prompt_template": "solve it"}, r"no column.*\{prompt\}"),
        ({"prompt_column": "promt"}, "'promt' among .*'answer', 'level', 'prompt'"),
        ({"columns": {"answer": "anwser"}}, "'anwser' among .*'answer'"),
    ],
)
def test_an_unknown_column_or_a_faulty_template_is_named(llama3_tokenizer, options, message):
    (key,) = options
    with pytest.raises(ValueError, match=f"^{key}.*{message}"):
        make(llama3_tokenizer, **options)


def test_data_that_take_long_say_how_far_they_are(llama3_tokenizer, monkeypatch, caplog):
    monkeypatch.setattr("torchtune_grpo.data.dataset._REPORT_SECONDS", 0)
    with caplog.at_level("INFO"):
        make(llama3_tokenizer, ROWS)
    assert "rows: 2 of 3 rows are read and tokenized; num_samples takes fewer." in caplog.messages


@pytest.mark.parametrize("kind", ["list", "jsonl", "jsonl.gz", "parquet"])
def test_later_rows_are_read_when_they_are_drawn(
    llama3_tokenizer, monkeypatch, caplog, tmp_path, kind
):
    """In the place of one that cannot be used comes the next one, after the last the first."""
    monkeypatch.setattr("torchtune_grpo.data.dataset._FIRST", 2)
    table = [*ROWS, ("long " * 9, "7"), ("3+3?", "six?"), (None, "1"), ("4+4?", "8"), (" ", "9")]
    table = [dict(zip(ROWS[0], (*row, 1))) if isinstance(row, tuple) else row for row in table]
    given = {"rows": table}
    if kind != "list":
        file = tmp_path / f"rows.{kind}"
        write = {"parquet": datasets.Dataset.to_parquet}.get(kind, datasets.Dataset.to_json)
        write(datasets.Dataset.from_list(table), file)
        given = {"source": str(file), "split": "train[:5]+train[5:]"}

    def short(items):
        """A rule that ends the run if it raises for the first rows, and only skips later ones."""
        if max(len(item["tokens"]) for item in items) > 25:
            raise ValueError("too long")
        return {}

    with caplog.at_level("INFO"):
        data = RLDataset(llama3_tokenizer, **given, chat=False)
        RewardSet([Reward("right", math_correctness_reward)]).check_data(data, key="dataset")
        data.check(short, where="dataset")
        drawn = [(item["index"], item["prompt"].text) for item in [*data, *data][: len(data)]]
    later = [(6, "4+4?")] * 4
    first = [(0, "1+1?"), (1, "twelve times twelve?"), (2, "2+3?")]
    assert drawn == [*first, *later, (0, "1+1?")]
    assert [text.partition("row ")[2] for text in caplog.messages] == [
        "3 (counted from 0) is skipped: too long; 1 so far.",
        "4 (counted from 0) is skipped: the reward 'right' can score no answer: answer='six?' does "
        "not state one number; 2 so far.",
        "5 (counted from 0) is skipped: column 'prompt' is not text: None; 3 so far.",
        "7 (counted from 0) is skipped: column 'prompt' is blank; 4 so far.",
    ]
    assert data[-2] == data[6] and data[6]["columns"] == {"answer": "8", "level": 1}
    assert len(RLDataset(llama3_tokenizer, **given, num_samples=4)) == 4
    data.check(lambda items: {0: "odd", 1: None}, where="dataset", drawn_rows=False)
    assert len(data) == 7 and data[1]["prompt"].text == "2+3?"


def test_a_developer_is_the_system_and_parts_of_text_are_one_text(llama3_tokenizer):
    parts = [{"type": "text", "text": text} for text in ("1+", "1?")]
    rows = [{"prompt": chat(("developer", "Be brief."), ("user", parts))}]
    (item,) = make(llama3_tokenizer, rows)
    assert item["prompt"].messages == chat(("system", "Be brief."), ("user", "1+1?"))


def test_columns_with_names_of_reward_arguments_are_refused(llama3_tokenizer):
    rows = [{"prompt": "1+1?", "completions": "x"}]
    with pytest.raises(ValueError, match="completions.*columns={other_name: completions}"):
        make(llama3_tokenizer, rows)
    assert make(llama3_tokenizer, rows, columns={"a": "completions"})[0]["columns"] == {"a": "x"}
    with pytest.raises(ValueError, match="completion_ids"):
        make(llama3_tokenizer, ROWS, columns={"completion_ids": "answer"})


# Rows


TEXT = {"type": "text", "text": "What is in it?"}
BAD_ROWS = [
    ({"prompt": 7}, "column 'prompt' is not text: 7"),
    ({"prompt": " \n"}, "column 'prompt' is blank"),
    ({"prompt": "a\ud83d"}, "column 'prompt' is not valid Unicode"),  # half of a surrogate pair
    (None, "it has no columns: None"),
    ({"prompt": []}, "the last message is not the user's or a tool's"),
    ({"prompt": chat(("user", "a"), ("assistant", "b"))}, "the last message is not"),
    ({"prompt": ["1+1?"]}, "message 0 has role=None: give one of system, user, assistant, tool"),
    ({"prompt": chat(("bot", "1+1?"))}, "message 0 has role='bot': give one of"),
    ({"prompt": chat(("user", [{"type": "text"}]))}, "the content of message 0 is not text: [{"),
    (
        {"prompt": chat(("user", [TEXT, {"type": "image"}]))},
        "the content of message 0 is not text: [{",
    ),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_rows_without_a_prompt_are_left_out_and_reported(llama3_tokenizer, caplog, row, reason):
    caplog.set_level(logging.INFO)
    data = make(llama3_tokenizer, [{"prompt": "a"}, row, {"prompt": "b"}])
    assert [item["prompt"].text for item in data] == ["a", "b"] and [*data.row_numbers] == [0, 2]
    (message,) = caplog.messages
    assert message.startswith(f"rows: 1 of 3 rows (counted from 0) are left out: {reason}")
    assert message.endswith(" (row 1).")


def test_nothing_left_is_an_error(llama3_tokenizer):
    with pytest.raises(ValueError, match="^rows: there are no rows"):
        make(llama3_tokenizer, [])
    with pytest.raises(ValueError, match="3 of 3 rows .* longer than max_prompt_tokens=4"):
        make(llama3_tokenizer, chat=False, max_prompt_tokens=4)


def test_a_blank_prompt_in_a_template_is_blank(llama3_tokenizer):
    rows = [{"prompt": "", "unit": ""}, {"prompt": "a", "unit": ""}, {"prompt": "b", "unit": None}]
    data = make(llama3_tokenizer, rows, prompt_template="Solve: {prompt} {unit}")
    assert [item["prompt"].text for item in data] == ["Solve: a "]


def test_a_transform_makes_the_rows_and_may_refuse_some(llama3_tokenizer):
    def to_row(row: Any) -> dict[str, Any]:
        if row["level"] == 3:
            raise ValueError("level 3 is too hard")
        return {"prompt": row["prompt"].upper(), "twice": 2 * row["level"]}

    data = make(llama3_tokenizer, transform=to_row)
    found = [(item["prompt"].text, item["columns"]["twice"]) for item in data]
    assert found == [("1+1?", 2), ("2+3?", 2)]
    with pytest.raises(ValueError, match="^rows: 1 of 1 rows .*: level 3 is too hard .row 0"):
        make(llama3_tokenizer, [ROWS[1]], transform=to_row)
    with pytest.raises(ValueError, match="it has no column 'depth', but .'answer', 'level', 'pro"):
        make(llama3_tokenizer, transform=lambda row: {"prompt": row["depth"]})


def test_num_samples_takes_the_first_usable_rows(llama3_tokenizer):
    for num_samples, count in [(2, 2), (99, 3)]:
        data = make(llama3_tokenizer, [{**ROWS[0], "prompt": ""}, *ROWS], num_samples=num_samples)
        assert [item["prompt"].text for item in data] == [row["prompt"] for row in ROWS[:count]]
    with pytest.raises(ValueError, match="^num_samples=0: give 1 or more"):
        make(llama3_tokenizer, num_samples=0)


def test_arguments_that_contradict_each_other_are_refused(llama3_tokenizer):
    with pytest.raises(ValueError, match="^source=None: give either source or rows"):
        RLDataset(llama3_tokenizer)
    with pytest.raises(ValueError, match="^source='x.json': give either source or rows"):
        make(llama3_tokenizer, source="x.json")
    with pytest.raises(ValueError, match="^sep=';': unknown argument for rows"):
        make(llama3_tokenizer, sep=";")
    table = datasets.Dataset.from_list(ROWS)
    with pytest.raises(ValueError, match="^rows: a mapping of train, test; give one split of it"):
        make(llama3_tokenizer, datasets.DatasetDict({"train": table, "test": table}))
    with pytest.raises(ValueError, match="^rows: a mapping of prompt, answer; give a list of dic"):
        make(llama3_tokenizer, {"prompt": ["1+1?"], "answer": ["2"]})
    pictures = [{"prompt": "a", "images": [], "n": 1}, {"prompt": "b", "images": ["x"], "n": 2}]
    with pytest.raises(ValueError, match="^columns: row 1 has images, which the model would not s"):
        make(llama3_tokenizer, pictures)
    shown = make(llama3_tokenizer, pictures, columns={"files": "images"})
    assert [item["columns"] for item in shown] == [{"files": [], "n": 1}, {"files": ["x"], "n": 2}]
    with pytest.raises(ValueError, match="^row 1 .*answer.*before it "):
        make(llama3_tokenizer, [{"prompt": "a"}, {"prompt": "b", "answer": "1"}])


def test_the_tokenizers_limit_leaves_prompts_out_and_cuts_none(qwen2_tokenizer):
    whole = [*make(qwen2_tokenizer)]
    longest = max(len(item["tokens"]) for item in whole)
    limited = copy.copy(qwen2_tokenizer)
    limited.max_seq_len = longest
    assert [*make(limited)] == whole
    limited.max_seq_len = longest - 1
    kept = make(limited)
    assert [*kept.row_numbers] == [0, 2]
    assert [item["tokens"] for item in kept] == [whole[row]["tokens"] for row in (0, 2)]
    with pytest.raises(ValueError, match="longer than tokenizer.max_seq_len=2 "):
        limited.max_seq_len = 2
        make(limited)


# Files


def write(folder: Path, name: str, rows: Any) -> str:
    """Writes rows in the format that the name says."""
    table, path = pandas.DataFrame(rows), folder / name
    writers = {
        "json": partial(table.to_json, orient="records", indent=1),
        "jsonl": partial(table.to_json, orient="records", lines=True),
        "csv": partial(table.to_csv, index=False),
        "tsv": partial(table.to_csv, index=False, sep="\t"),
        "txt": partial(table.to_csv, index=False, columns=["prompt"], header=False),
        "parquet": table.to_parquet,
        "arrow": table.to_feather,
    }
    plain = name.removesuffix(".gz").removesuffix(".xz").removesuffix(".bz2")
    writers[plain.rpartition(".")[2].replace("ndjson", "jsonl")](path)
    return str(path)


@pytest.mark.parametrize(
    "ending", "jsonl json csv tsv txt ndjson jsonl.gz jsonl.xz csv.bz2 txt.gz parquet arrow".split()
)
def test_a_file_is_known_by_its_name(llama3_tokenizer, tmp_path, ending):
    """The rows are what the file holds; CSV has no types, so that its numbers are read as such."""
    rows = [{"prompt": f"{n} + ü?", "answer": n, "other": "None"} for n in (1, 2, 30)]
    path = write(tmp_path, f"my.rows.{ending}", rows)
    ending = ending.partition(".")[0]
    options = {"prompt_column": "text"} if ending == "txt" else {}
    if ending == "txt":
        rows = [{"prompt": row["prompt"]} for row in rows]
    expected = [*make(llama3_tokenizer, rows)]
    assert [*RLDataset(llama3_tokenizer, source=path, **options)] == expected
    (second,) = RLDataset(llama3_tokenizer, source=path, split="any[1:2]", **options)
    assert second["prompt"].text == rows[1]["prompt"]
    formats = {"jsonl": "json", "ndjson": "json", "tsv": "csv", "txt": "text"}
    source = formats.get(ending, ending)
    old = RLDataset(llama3_tokenizer, source=source, data_files=path, **options)
    assert [*old] == expected


def test_values_are_those_of_the_file(llama3_tokenizer, tmp_path):
    """Of JSON all, which `datasets` would not give; of CSV the texts."""
    rows = [
        {"prompt": "a", "gold": "2024-01-02", "n": 3, "big": 10**30, "tags": ["x", 1]},
        {"prompt": "b\u2028c", "gold": "2024-01-03", "n": 2.5, "big": 0, "tags": {"y": None}},
    ]
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\ufeff" + "\n".join(lines) + "\n\n")
    data = RLDataset(llama3_tokenizer, source=str(path))
    assert [{"prompt": item["prompt"].text, **item["columns"]} for item in data] == rows
    assert type(data[0]["columns"]["n"]) is int
    path.write_text('{"prompt": "a"}\n{"prompt": 5}\n{"prompt": "b", "answer": 1}\n')
    data = RLDataset(llama3_tokenizer, source=str(path))
    assert [item["columns"]["answer"] for item in data] == [None, 1]
    csv = tmp_path / "rows.csv"
    csv.write_text('prompt,answer,flag,n\n"NA, or\nnull",nan,True,1\nNone,3,false,2\nx,,TRUE,3\n')
    data = RLDataset(llama3_tokenizer, source=str(csv))
    items = [(item["prompt"].text, *item["columns"].values()) for item in data]
    expected = [("NA, or\nnull", "nan", "True", 1), ("None", "3", "false", 2), ("x", "", "TRUE", 3)]
    assert items == expected
    # Text from the first file on, which alone would give numbers
    (tmp_path / "more.csv").write_text("prompt,answer,flag,n\ny,4,True,\n")
    files = {"train": str(csv), "test": str(tmp_path / "more.csv")}
    for data_files in (files, [*files.values()]):
        data = RLDataset(llama3_tokenizer, source="csv", data_files=data_files)
        assert [item["columns"]["n"] for item in data] == ["1", "2", "3", ""][: len(data)]


def test_of_a_stream_only_so_many_rows_are_fetched(llama3_tokenizer, tmp_path, monkeypatch):
    path = str(tmp_path / "rows.parquet")
    table = [{"prompt": f"{n}?"} for n in range(40)]
    datasets.Dataset.from_list(table).to_parquet(path, batch_size=4)
    read, yields = [], datasets.IterableDataset.__iter__

    def counted(self):
        for row in yields(self):
            read.append(row)
            yield row

    monkeypatch.setattr(datasets.IterableDataset, "__iter__", counted)
    stream = {"source": "parquet", "data_files": path, "streaming": True}
    data = RLDataset(llama3_tokenizer, num_samples=6, **stream)
    assert [item["prompt"].text for item in data] == [row["prompt"] for row in table[:6]]
    assert len(read) == 6


def test_data_sets_of_the_library(llama3_tokenizer, tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    splits = datasets.DatasetDict({"train": table, "test": table.select([1])})
    splits.save_to_disk(tmp_path / "splits")
    expected = [*make(llama3_tokenizer)]
    assert [*make(llama3_tokenizer, table)] == expected
    for source in (str(tmp_path / "one"), str(tmp_path / "splits")):
        assert [*RLDataset(llama3_tokenizer, source=source)] == expected
        second = RLDataset(llama3_tokenizer, source=source, split="train[1:2]")
        assert [item["prompt"].text for item in second] == ["twelve times twelve?"]
    (item,) = RLDataset(llama3_tokenizer, source=source, split="test")
    assert item["columns"]["answer"] == "144"
    both = RLDataset(llama3_tokenizer, source=source, split="train[50%:]+test")
    assert [item["columns"]["answer"] for item in both] == ["5", "144"]
    with pytest.raises(ValueError, match="split='tset': .*train"):
        RLDataset(llama3_tokenizer, source=source, split="tset")


# Messages


TURNS = chat(("user", "1+1?"), ("assistant", "2"), ("user", "Sure?"))


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow"])
def test_messages_are_prompts(llama3_tokenizer, tmp_path, ending):
    """Also with keys that other messages lack."""
    own = chat(("system", "Be long."), ("user", "2+2?"))
    rows = [{"prompt": TURNS, "answer": "2"}, {"prompt": own, "answer": "4"}]
    rows[0]["prompt"] = [{**TURNS[0], "name": "Ann"}, *TURNS[1:]]
    source = write(tmp_path, f"rows.{ending}", rows)
    data = RLDataset(llama3_tokenizer, source=source, system_prompt="Be brief.", prefill="So")
    assert [item["prompt"].text for item in data] == ["Sure?", "2+2?"]
    assert data[0]["prompt"].messages == chat(("system", "Be brief.")) + rows[0]["prompt"]
    assert data[1]["prompt"].messages == own
    encoder = PromptEncoder(llama3_tokenizer, system_prompt="Be brief.", prefill="So")
    assert [item["tokens"] for item in data] == [encoder(TURNS), encoder(own)]


def test_nulls_of_arrow_are_no_arguments_of_a_call(tmp_path):
    """A table gives each call the arguments of all others, as null."""
    write_tokenizer(tmp_path, "qwen2_5")
    calls = [{"name": "add", "arguments": {"x": 1}}, {"name": "find", "arguments": {"city": "B"}}]
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        for call in calls
    ]
    rows = [{"prompt": [*chat(("user", "1?")), *turns, {"role": "user", "content": "2?"}]}]
    table = datasets.Dataset.from_list(rows)
    assert "'city': None" in str(table[0])
    prompts = (RLDataset(HFTokenizer(str(tmp_path)), rows=each)[0] for each in (rows, table))
    first, second = (prompt["prompt"].messages for prompt in prompts)
    found = [turn["tool_calls"][0]["function"] for turn in second if turn["role"] == "assistant"]
    assert found == calls and first == second


@pytest.mark.parametrize("name", ["smollm2", "llama3_2", "gemma", "qwen3", "deepseek_r1_distill"])
def test_a_prompt_that_the_template_has_written_is_left_out(tmp_path, name):
    """Its marks would be read as text, or the template would come twice."""
    write_tokenizer(tmp_path, name)
    tokenizer = HFTokenizer(str(tmp_path))
    written = tokenizer.chat_text([{"role": "user", "content": "What is 1 + 1?"}])
    for chat_format in (True, False):
        with pytest.raises(ValueError, match="the chat template has already written it; give the "):
            make(tokenizer, [{"prompt": written}], chat=chat_format)
        assert len(make(tokenizer, [{"prompt": "What is <|im_start|>?"}], chat=chat_format)) == 1


def test_messages_need_the_chat_format_and_no_template(
    llama3_tokenizer, sentencepiece_tokenizers, caplog
):
    rows = [{"prompt": "1+1?"}, {"prompt": TURNS}]
    with pytest.raises(ValueError, match="'Q: {prompt}' takes no list of messages"):
        make(llama3_tokenizer, rows[1:], prompt_template="Q: {prompt}")
    assert len(make(llama3_tokenizer, rows, prompt_template="{prompt}")) == 2
    with pytest.raises(ValueError, match="messages need chat=True"):
        make(llama3_tokenizer, rows[1:], chat=False)
    caplog.set_level(logging.INFO)
    system = {"prompt": chat(("system", "Be brief."), ("user", "1+1?"))}
    assert len(make(sentencepiece_tokenizers["mistral"], [*rows, system])) == 2
    assert "the chat format refuses it: System prompts are not" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_files": "/nowhere/rows"}, "^source='json', data_files='/nowhere/.*No such file"),
        ({}, "^source='json', .*give the path"),
        ({"data_files": {"train": "rows.jsonl"}, "split": "tset"}, r"split='tset': .*\['train'\]"),
        ({"data_files": "rows.jsonl", "bogus": 9}, "bogus: JSON files take encoding and field alo"),
        ({"data_files": "rows.jsonl", "streaming": True}, "streaming: .*they need no streaming"),
        ({"source": "more.csv"}, "more.csv, line 4: 3 fields, and the header has 2; put texts wi"),
        ({"source": "fewer.csv"}, "fewer.csv, line 3: 1 fields, and the header has 2"),
        ({"data_files": "broken.jsonl"}, "broken.jsonl'.* line 2 of the file: "),
        ({"data_files": "empty.jsonl"}, "there are no rows"),
        ({"data_files": "latin.jsonl"}, "not in UTF-8; set encoding, as to latin-1 or utf-16"),
        ({"data_files": "rows.jsonl", "source": "csv"}, "prompt_column: there is no column 'pro"),
        ({"source": "my.csv"}, "source='my.csv', .* Unable to find"),
        (
            {"source": "rows.xlsx"},
            "rows.xlsx'.* a file ends in .jsonl, .*source=json data_files=ro",
        ),
        ({"source": "rows.jsonl.zst"}, "pip install zstandard"),
        ({"source": "some/name"}, "^source='some/name', .* no file some/name, .*HF_HUB_OFFLINE=1"),
        ({"data_files": "rows.jsonl", "split": "trian"}, "trian': the file has no splits; use tr"),
        ({"data_files": "rows.jsonl", "source": "parquet"}, "source='parquet', .*magic bytes"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    llama3_tokenizer, tmp_path, monkeypatch, caplog, options, message
):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("broken.jsonl").write_text('{"prompt": "a"}\n{"prompt":\n')
    Path("empty.jsonl").write_text("")
    Path("rows.xlsx").touch()
    Path("more.csv").write_text('prompt,answer\n"a, or\nb",1\nIs it 1, or 2?,3\n')
    Path("fewer.csv").write_text("prompt,answer\na,1\nb\n")
    Path("rows.jsonl.zst").touch()
    Path("latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as raised:
        RLDataset(llama3_tokenizer, **{"source": "json", **options})
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 700


def test_equal_sets_have_the_same_digest():
    """Their order depends on how they were made and, for texts, on the process."""
    one, other = {0, 8}, {8, 0}
    assert [*one] != [*other] and digest([{"any": one}]) == digest([{"any": other}])
    assert digest([{"any": one}]) != digest([{"any": {0, 7}}])
