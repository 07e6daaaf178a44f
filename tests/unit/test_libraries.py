"""Environments of libraries that people train with, as their users write them."""

import psutil
import pytest
from conversations import END, play
from hf_tokenizers import write_tokenizer
from test_environments import call

from torchtune_grpo.models import hf_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return hf_tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("qwen"), "qwen2_5")))


def test_a_client_of_openenv_plays_on_a_server_of_its_own(qwen):
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    before = {process.pid for process in psutil.process_iter()}
    talks = [[call("guess", number=n) + END for n in (5, last)] + ["So." + END] for last in (7, 9)]
    rows = [{"prompt": [{"role": "user", "content": "Play."}], "secret": 7}]
    found, scores = play(qwen, talks, rows=rows, _component_="openenv_game.PlayedOnItsServer")
    assert str(found.prompts[0]) == "Play. Guess a number."
    told = [[m["content"] for m in t.messages if m["role"] == "tool"] for t in found.completions]
    assert told == [["higher", "right"], ["higher", "lower"]]
    assert scores.of("PlayedOnItsServer").tolist() == [1, 0]
    new = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    assert not any("openenv_game:app" in (process.info["cmdline"] or ()) for process in new)


def test_a_game_of_textarena_is_the_same_for_a_group(qwen):
    pytest.importorskip("textarena", reason="textarena is not installed")
    orders = [range(1, 21)] * 2 + [range(20, 0, -1)] * 2
    talks = [[f"[{n}]" + END for n in order] for order in orders]
    rows = [{"prompt": [{"role": "user", "content": "Play."}]}]
    game = {"_component_": "textarena_game.Played", "max_turns": 20, "max_response_tokens": 7000}
    found, scores = play(qwen, talks, rows=rows, **game)
    assert all("between 1 and 20" in str(prompt) for prompt in found.prompts)
    up, also_up, down, also_down = scores.of("Played").tolist()
    assert up == also_up != down == also_down  # one order finds the number within ten turns
    assert {talk.ended for talk in found.completions} == {"done"}


def test_textarenas_own_step_is_refused_by_name(qwen):
    pytest.importorskip("textarena", reason="textarena is not installed")
    rows = [{"prompt": "Play.", "num_players": 1}]
    game = {"_component_": "textarena.make", "env_id": "GuessTheNumber-v0"}
    with pytest.raises(ValueError, match=r"step\(\) raised TypeError: step returned 2 values"):
        play(qwen, [["[5]" + END]], rows=rows, **game)
