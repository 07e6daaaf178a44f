"""The examples of docs/environments.md, played as they stand on the page."""

import re
import sys
from pathlib import Path

import pytest
from conversations import END, play
from hf_tokenizers import write_tokenizer
from omegaconf import OmegaConf
from test_environments import call

from torchtune_grpo.environments.conversations import STOPS
from torchtune_grpo.models import hf_tokenizer

PAGE = (Path(__file__).parents[2] / "docs/environments.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def played(tmp_path, monkeypatch):
    """Play scripts with one of the page's configs."""
    (tmp_path / "my_env.py").write_text("\n".join(blocks("python")))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_env", raising=False)
    tokenizer = hf_tokenizer(str(write_tokenizer(tmp_path, "qwen2_5")))
    configs = [OmegaConf.to_object(OmegaConf.create(text)) for text in blocks("yaml")]

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
    table = PAGE.partition("| Ended |")[2].partition("\n\n")[0]
    assert {*re.findall(r"`(\w+)`", table)} >= {*STOPS}
