"""Examples of docs/data.md and docs/models.md, run as they stand on the page."""

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from torchtune_grpo.config.check import instantiate
from torchtune_grpo.config.keys import DynamicSamplingConfig
from torchtune_grpo.data import RLDataset
from torchtune_grpo.models.families import FAMILIES
from torchtune_grpo.rewards import RewardSet

ROOT = Path(__file__).parents[2]
DATA, MODELS = ((ROOT / f"docs/{name}.md").read_text() for name in ("data", "models"))


def blocks(language):
    """Those of the page on data."""
    return re.findall(rf"```{language}\n(.*?)```", DATA, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (row,) = blocks("json")
    lines = json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n" + row
    Path("more").mkdir()
    for name in ("problems.jsonl", "more/a.jsonl", "held_out.data"):
        Path(name).write_text(lines)


def test_forms_of_a_data_set(folder, llama3_tokenizer):
    *nodes, mixed, resampling = map(OmegaConf.create, blocks("yaml"))
    nodes = [node.dataset for node in nodes]
    local = [node for node in nodes if node.source != "openai/gsm8k"]
    assert len(nodes) == 3 and len(local) == 2
    for node in local:
        data = instantiate("dataset", node, llama3_tokenizer)
        assert len(data) == 2 and data[1]["prompt"].text == "What is 3 + 4?"
    for node in mixed.dataset.datasets.values():
        node |= {"_component_": "torchtune_grpo.data.RLDataset", "source": "problems.jsonl"}
        node.split = "train"
    data = instantiate("dataset", mixed.dataset, llama3_tokenizer)
    assert [item["columns"]["dataset"] for item in data] == ["math"] * 2 + ["code"] * 2
    assert RewardSet.from_config(mixed.rewards).names == ["correctness"]
    assert DynamicSamplingConfig(**resampling.dynamic_sampling).max_resamples == 3


def test_a_data_set_in_python(folder, llama3_tokenizer):
    code, _ = blocks("python")  # the sampler's is that of test_samplers.py
    exec(code, {"tokenizer": llama3_tokenizer})


def test_left_out_rows_are_reported_in_these_words(folder, llama3_tokenizer, caplog):
    prompts = ["1+1?", None, "2+2?", "x" * 91, None]
    Path("problems.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    with caplog.at_level("INFO"):
        RLDataset(llama3_tokenizer, source="problems.jsonl", max_prompt_tokens=64)
    (said,) = caplog.messages
    shown = re.search(r"\n( {4}source=.*?)\n\n", DATA, re.DOTALL)[1]
    assert said == " ".join(shown.split())


def test_the_page_on_models_has_all_families():
    assert tuple(re.findall(r"^\| `(\w+)` \|", MODELS, re.M)) == tuple(FAMILIES)
