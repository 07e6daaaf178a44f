"""Each form of a data set that docs/data.md shows, run as it stands on the page."""

import gzip
import json
import re
from pathlib import Path

import datasets
import pytest
from omegaconf import OmegaConf

from torchtune_grpo.config.components import instantiate
from torchtune_grpo.config.keys import DynamicSamplingConfig
from torchtune_grpo.data import RLDataset, make_sampler

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (row,) = blocks("json")
    lines = json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n" + row
    Path("more").mkdir()
    for name in ("problems.jsonl", "more/a.jsonl", "held_out"):
        Path(name).write_text(lines)
    Path("problems.txt.gz").write_bytes(gzip.compress(b"1+1?\n2+2?\n"))
    table = datasets.Dataset.from_list([json.loads(row)] * 2)
    datasets.DatasetDict(train=table).save_to_disk("saved")


def test_the_configs(llama3_tokenizer):
    *nodes, other, resampling = map(OmegaConf.create, blocks("yaml"))
    nodes = [node.dataset for node in nodes]
    local = [node for node in nodes if node.source != "openai/gsm8k"]
    assert len(nodes) == 5 and len(local) == 4
    for node in local:
        data = instantiate("dataset", node, llama3_tokenizer)
        assert len(data) == 2 and data[1]["prompt"] in ("What is 3 + 4?", "2+2?")
    leveled = [{"columns": {"level": level}} for level in (2, 1)]
    assert make_sampler(other.sampler, leveled, seed=0).next(1) == [1]
    assert DynamicSamplingConfig(**resampling.dynamic_sampling).max_resamples == 3


def test_the_python(llama3_tokenizer):
    (code,) = blocks("python")
    names = {"tokenizer": llama3_tokenizer}
    exec(code, names)
    assert code.count("RLDataset(") == 3 and names["rows"]


def test_what_is_left_out_is_told_in_these_words(llama3_tokenizer, caplog):
    prompts = ["1+1?", None, "2+2?", "x" * 91, None]
    Path("problems.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    with caplog.at_level("INFO"):
        RLDataset(llama3_tokenizer, source="problems.jsonl", max_prompt_tokens=64)
    (said,) = caplog.messages
    shown = " ".join(re.search(r"( {4}RLDataset,.*?)\n\n", PAGE, re.DOTALL)[1].split())
    assert re.sub(r"\d+ tokens", "", said) == re.sub(r"\d+ tokens", "", shown)
