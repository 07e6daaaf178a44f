"""Each form of a data set that docs/data.md shows, run as it stands on the page."""

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from torchtune_grpo.config.check import instantiate
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


def test_the_configs(llama3_tokenizer):
    *nodes, other, resampling = map(OmegaConf.create, blocks("yaml"))
    nodes = [node.dataset for node in nodes]
    local = [node for node in nodes if node.source != "openai/gsm8k"]
    assert len(nodes) == 3 and len(local) == 2
    for node in local:
        data = instantiate("dataset", node, llama3_tokenizer)
        assert len(data) == 2 and data[1]["prompt"] == "What is 3 + 4?"
    leveled = [{"columns": {"level": level}} for level in (2, 1)]
    assert make_sampler(other.sampler, leveled, seed=0).next(1) == [1]
    assert DynamicSamplingConfig(**resampling.dynamic_sampling).max_resamples == 3


def test_the_python(llama3_tokenizer):
    (code,) = blocks("python")
    exec(code, {"tokenizer": llama3_tokenizer})


def test_left_out_rows_are_reported_in_these_words(llama3_tokenizer, caplog):
    prompts = ["1+1?", None, "2+2?", "x" * 91, None]
    Path("problems.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    with caplog.at_level("INFO"):
        RLDataset(llama3_tokenizer, source="problems.jsonl", max_prompt_tokens=64)
    (said,) = caplog.messages
    shown = re.search(r"\n( {4}source=.*?)\n\n", PAGE, re.DOTALL)[1]
    assert said == " ".join(shown.split())
