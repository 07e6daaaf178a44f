"""What docs/data.md, docs/models.md and docs/objectives.md say, run as it stands on the page."""

import json
import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from torchtune_grpo.config.check import instantiate, read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import DynamicSamplingConfig, without_effect
from torchtune_grpo.data import RLDataset
from torchtune_grpo.data.samplers import make_sampler
from torchtune_grpo.loss import make_loss
from torchtune_grpo.models.build import SUPPORTED

ROOT = Path(__file__).parents[2]
DATA, MODELS, OBJECTIVES = (
    (ROOT / f"docs/{name}.md").read_text() for name in ("data", "models", "objectives")
)


def blocks(language):
    """Those of the page on data."""
    return re.findall(rf"```{language}\n(.*?)```", DATA, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (row,) = blocks("json")
    lines = json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n" + row
    Path("more").mkdir()
    for name in ("problems.jsonl", "more/a.jsonl", "held_out"):
        Path(name).write_text(lines)


def test_forms_of_a_data_set(folder, llama3_tokenizer):
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


def test_a_data_set_in_python(folder, llama3_tokenizer):
    (code,) = blocks("python")
    exec(code, {"tokenizer": llama3_tokenizer})


def test_left_out_rows_are_reported_in_these_words(folder, llama3_tokenizer, caplog):
    prompts = ["1+1?", None, "2+2?", "x" * 91, None]
    Path("problems.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    with caplog.at_level("INFO"):
        RLDataset(llama3_tokenizer, source="problems.jsonl", max_prompt_tokens=64)
    (said,) = caplog.messages
    shown = re.search(r"\n( {4}source=.*?)\n\n", DATA, re.DOTALL)[1]
    assert said == " ".join(shown.split())


def test_each_proof_of_a_model_is_a_test():
    files = ""
    for file, name in re.findall(r"`(tests/[\w/]+\.py|)::(\w+)`", MODELS):
        files = (ROOT / file).read_text() if file else files  # `::name` is of the file before
        assert f"def {name}(" in files, name
    assert tuple(re.findall(r"^\| `(\w+)` \|", MODELS, re.M)) == SUPPORTED


BLOCKS = re.findall(r"```yaml\n# ([^:]+):.*\n((?:.|\n)*?)```", OBJECTIVES)
PRESETS = {name: yaml.safe_load(text) for name, text in BLOCKS}
# The advantage, the aggregation, the ratio and its distances, as the papers have them.
PAPERS = {
    "GRPO": ("group", "grpo", "clipped", 0.2, 0.2),
    "Dr. GRPO": ("none", "dr_grpo", "clipped", 0.2, 0.2),
    "DAPO": ("group", "dapo", "clipped", 0.2, 0.28),
    "GSPO": ("group", "grpo", "sequence", 3e-4, 4e-4),
    "ScaleRL": ("batch", "prompt", "cispo", 1.0, 4.0),
    "DPPO": ("group", "dapo", "dppo", 0.15, 0.15),
    "GDPO": ("group", "dapo", "clipped", 0.2, 0.2),
    "MaxRL": ("max_rl", "dr_grpo", "clipped", 0.2, 0.2),
}


@pytest.mark.parametrize("name", {**PRESETS, **PAPERS})
def test_a_preset_is_what_its_paper_says(name):
    """No key is unknown, or without effect; each stands in the table of what they did."""
    settings = read_config(OmegaConf.merge(load_config("tiny_arithmetic_grpo"), PRESETS[name]))
    assert list(without_effect(settings)) == []
    assert re.search(rf"^\| {re.escape(name)} \| ", OBJECTIVES, re.M)
    loss, objective = make_loss(settings.loss), settings.objective
    ratio = "sequence" if loss.importance_sampling_level == "sequence" else loss.surrogate
    found = (objective.advantage, loss.aggregation, ratio, *loss.epsilons)
    assert found == PAPERS[name]
    assert loss.needs_reference == (name == "GRPO")
    aggregation = objective.multi_objective_aggregation
    assert (aggregation == "normalize_then_sum") == (name == "GDPO")
    assert (objective.sampling_correction == "old_logprobs") == (name == "DPPO")
