"""Examples of the docs, run as they stand on their pages, and tables that name all there is."""

import doctest
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from conversations import END, call, play
from hf_tokenizers import write_tokenizer
from omegaconf import OmegaConf

from torchtune_grpo import rewards as shipped
from torchtune_grpo.config.check import instantiate
from torchtune_grpo.config.keys import DynamicSamplingConfig
from torchtune_grpo.data import RLDataset
from torchtune_grpo.environments.conversations import STOPS
from torchtune_grpo.models import hf_tokenizer
from torchtune_grpo.models.families import FAMILIES
from torchtune_grpo.rewards import RewardSet, TrainerState

DOCS = Path(__file__).parents[2] / "docs"
DATA, MODELS, ENVIRONMENTS, REWARDS = (
    (DOCS / f"{name}.md").read_text() for name in ("data", "models", "environments", "rewards")
)
EXAMPLES = dict(
    re.findall(r"<!-- example: (\w+) -->\n(.*?)(?=<!-- example|\n## )", REWARDS, re.DOTALL)
)


def blocks(language, page):
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


# --- docs/data.md and docs/models.md ----------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (row,) = blocks("json", DATA)
    lines = json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n" + row
    Path("more").mkdir()
    for name in ("problems.jsonl", "more/a.jsonl", "held_out.data"):
        Path(name).write_text(lines)


def test_forms_of_a_data_set(folder, llama3_tokenizer):
    *nodes, mixed, resampling = map(OmegaConf.create, blocks("yaml", DATA))
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
    code, _ = blocks("python", DATA)  # the sampler's is that of test_samplers.py
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


# --- docs/environments.md ------------------------------------------------------------------------


@pytest.fixture
def played(tmp_path, monkeypatch):
    """Play scripts with one of the page's configs."""
    (tmp_path / "my_env.py").write_text("\n".join(blocks("python", ENVIRONMENTS)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_env", raising=False)
    tokenizer = hf_tokenizer(str(write_tokenizer(tmp_path, "qwen2_5")))
    configs = [OmegaConf.to_object(OmegaConf.create(text)) for text in blocks("yaml", ENVIRONMENTS)]

    def play_with(number, scripts, **row):
        rows = [{"prompt": [{"role": "user", "content": "Hi"}], **row}]
        settings = {"max_response_tokens": 3000, **configs[number]["environment"]}
        return play(tokenizer, scripts, rows=rows, max_tokens=1000, **settings)

    return play_with


def test_calculator(played):
    use = call("multiply", x=6, y=7) + END
    right, wrong = (call("submit", answer=each) + END for each in (42, 41))
    rows, scores = played(0, [[use, right, "Bye" + END], [use, wrong, "Bye" + END]], a=6, b=7)
    assert scores.of("Calculator").tolist() == [1, 0]
    assert rows.completions[0].messages[1]["content"] == "42"


def test_several_environments_and_a_guess(played):
    games = {"environment": "games", "secret": 7}
    rows, scores = played(1, [["9" + END, "I" + END, "7" + END], ["8" + END] * 8], **games)
    assert scores.of("Guess").tolist() == [1, 0] and scores.of("Calculator").isnan().all()
    said = [turn["content"] for turn in rows.completions[0].messages if turn["role"] == "user"]
    assert said == ["lower", "Say a number."]


def test_search_within_the_message(played):
    script = ["<search>capital of France</search>", "<answer>Paris</answer>" + END]
    rows, scores = played(2, [script], answer="Paris")
    assert scores.of("Search").tolist() == [1]
    assert "</search><information>Paris</information><answer>" in rows.completions[0].text


def test_the_page_names_all_ends():
    table = ENVIRONMENTS.partition("| Ended |")[2].partition("\n\n")[0]
    assert {*re.findall(r"`(\w+)`", table)} >= {*STOPS}


# --- docs/rewards.md -----------------------------------------------------------------------------


def block(example: str, language: str) -> str:
    """The only one of an example in docs/rewards.md."""
    (found,) = blocks(language, EXAMPLES[example])
    return found


@pytest.mark.parametrize("example", ["short", "chat"])
def test_worked_example(example, tmp_path, monkeypatch):
    """The file, the config, and what the page says comes out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    source = block(example, "python")
    assert source.startswith("# my_rewards.py\n")
    (tmp_path / "my_rewards.py").write_text(source)
    config = yaml.safe_load(block(example, "yaml"))
    rewards = RewardSet.from_config(config["rewards"])
    names = {"rewards": rewards, "state": TrainerState(global_step=0, max_steps=1)}
    session = doctest.DocTestParser().get_doctest(
        block(example, "pycon"), names, example, "rewards.md", 0
    )
    assert len(session.examples) >= 2
    outcome = doctest.DocTestRunner().run(session)
    monkeypatch.delitem(sys.modules, "my_rewards")
    assert outcome.failed == 0


def test_there_are_four_and_all_shipped_rewards_are_listed():
    ours = ["judge", "model"]  # test_judge.py, test_reward_model.py
    assert list(EXAMPLES) == ["short", "chat", *ours]
    table = REWARDS.partition("## Shipped rewards")[2]
    listed = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    others = {"Reward", "RewardFailure", "RewardFunction", "RewardScores", "RewardSet"}
    others |= {"Answers", "Decider", "TrainerState", "grade_math_answer", "math_format_holds"}
    assert listed == set(shipped.__all__) - others
