"""Environments as people write them, in processes of their own."""

import json
import os
import random
import sqlite3
import sys
import time
from pathlib import Path

import hosted
import psutil
import pytest
import torch
from conversations import END, ScriptedEngine, call, play
from hf_tokenizers import write_tokenizer
from processes import is_alive, wait_until
from runs import run

from torchtune_grpo import models
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import EnvironmentConfig
from torchtune_grpo.config.text import ConfigError
from torchtune_grpo.environments.adapters import Turn
from torchtune_grpo.environments.kinds import make_kinds
from torchtune_grpo.environments.sessions import Kind
from torchtune_grpo.machine.loop import in_thread
from torchtune_grpo.models import hf_tokenizer
from torchtune_grpo.rewards import Reward
from torchtune_grpo.run import Run
from torchtune_grpo.sandbox.remote import ObjectLost
from torchtune_grpo.trajectory import Samples

HI = {"prompt": [{"role": "user", "content": "Hi"}]}
TALK = ["Yes" + END] * 9


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return hf_tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("qwen"), "qwen2_5")))


def use(tool, **arguments):
    """A turn that calls a tool."""
    return call(tool, **arguments) + END


def results(talk):
    return [turn["content"] for turn in talk.messages if turn["role"] == "tool"]


def node(name, **arguments):
    """An environment of hosted.py."""
    return {"_component_": f"hosted.{name}", **arguments}


# --- A script's own classes ------------------------------------------------------------------

SCRIPT = """
import math
from torchtune_grpo.config.keys import EnvironmentConfig
from torchtune_grpo.environments.adapters import Turn
from torchtune_grpo.environments.kinds import make_kinds

FACTS = {"pi": math.pi}

def look_up(name):
    return FACTS.get(name, math.nan)

class Base:
    def reset(self, name, **row):
        self.name = name

class Asks(Base):
    def __init__(self, digits):
        self.digits = digits

    def reset(self, **row):
        super().reset(**row)
        return f"What is {self.name}?"

    async def step(self, text):
        is_right = text == f"{look_up(self.name):.{self.digits}f}"
        return None, float(is_right), True

settings = EnvironmentConfig(_component_="__main__.Asks", digits=2)
(kind,) = make_kinds(settings, [], {"environment": Asks}).values()
session = kind.session()
print(session.reset({"name": "pi"}, 0), session.answer(Turn("3.14")).reward)
print(session.environment.name)
kind.close()
"""


def test_a_class_of_a_script_is_handed_over_with_what_it_uses_there(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert run("script.py", cwd=tmp_path).out.split("\n")[:2] == ["What is pi? 1.0", "pi"]


def test_what_cannot_be_handed_over_is_refused():
    books = sqlite3.connect(":memory:")

    def look(what: str) -> str:
        """
        Looks.

        Args:
            what: At what.
        """
        return str(books.execute(what).fetchall())

    with pytest.raises(ConfigError, match=r"tools\[0\]: .* handed to another process .*sqlite3"):
        make_kinds(EnvironmentConfig(), ["my.look"], {"tools.0": look})


# --- What works in a script ------------------------------------------------------------------


def test_a_tool_with_a_limit_by_sigalrm(qwen):
    """As the agent of TRL's examples has one; only a process's main thread can set an alarm."""
    talks = [[use("run_with_limit"), "So." + END]] * 3
    rows, _ = play(qwen, talks, tools=["hosted.run_with_limit"])
    assert [results(talk) for talk in rows.completions] == [["time is over"]] * 3


def test_what_belongs_to_a_thread_and_what_is_global_stay_from_call_to_call(qwen):
    before = random.getstate()
    _, scores = play(qwen, [TALK] * 8, **node("OfItsThread"))
    assert scores.of("OfItsThread").tolist() == [2] * 8
    assert random.getstate() == before


def test_tools_in_processes_run_side_by_side(qwen, tmp_path):
    talks = [[use("meet", folder=str(tmp_path), name=name), "So." + END] for name in "abcdef"]
    rows, _ = play(qwen, talks, tools=["hosted.meet"])
    assert [results(talk) for talk in rows.completions] == [["met"]] * 6


def test_an_async_tool_that_exits_fails_no_later_call(qwen):
    async def behave(how: str) -> str:
        """
        Behaves.

        Args:
            how: The way.
        """
        if how == "exit":
            sys.exit(3)
        return how

    for _ in range(2):
        ways = ["fine", "exit", "fine"]
        turns = [[use("behave", how=how), use("behave", how="fine"), "." + END] for how in ways]
        rows, _ = play(qwen, turns, tools=[behave], timeout=20.0)
        ended = [talk.ended for talk in rows.completions]
        assert ended == ["answered", "tool_failed", "answered"]
        assert results(rows.completions[0]) == ["fine"] * 2


def test_rewards_get_methods_and_the_values_of_attributes(qwen):
    async def reward(environments, **columns):
        (each,) = environments
        assert each.score == 4 and each.done is False
        assert each.seen["a"] == {1, 2} and str(each.seen["b"]) == "0.5"
        assert not hasattr(each, "scoer") and getattr(each, "scoer", None) is None
        with pytest.raises(AttributeError, match="'Scored' object has no attribute 'scoer'"):
            _ = each.scoer
        with pytest.raises(TypeError, match="lock is a lock, .* return plain data"):
            _ = each.lock
        assert each.add(more=5) == 9 and await each.later() == 9
        return [float(each.score)]

    rewards = [Reward("reward", reward)]
    talks = [[use("add", more=1), "So." + END]]
    _, scores = play(qwen, talks, rewards=rewards, **node("Scored"))
    assert scores.of("reward").tolist() == [9]


def test_a_session_that_a_reward_has_lost_is_not_used_again():
    (kind,) = make_kinds(EnvironmentConfig(_component_="hosted.Bad"), []).values()
    session = kind.session()
    session.reset({"how": "die", "when": "get_reward"}, 0)
    kind.idle.append(session)  # its conversation is over
    with pytest.raises(ObjectLost):
        session.environment.get_reward()
    assert kind.session().reset({"how": "fine", "when": "-"}, 0) is None
    kind.close()


def test_a_rollout_that_is_interrupted_leaves_no_session(qwen, monkeypatch):
    """Another would make new ones, beside processes that nobody uses: in a notebook, say."""
    left, close = [], Kind.close

    def interrupted(engine, request):
        raise KeyboardInterrupt

    def look(kind):
        left.append(len(kind._open))
        close(kind)

    monkeypatch.setattr(ScriptedEngine, "generate", interrupted)
    monkeypatch.setattr(Kind, "close", look)
    with pytest.raises(KeyboardInterrupt):
        play(qwen, [TALK, TALK], **node("Drawn"))
    assert left == [0]


# --- Seeds -----------------------------------------------------------------------------------


def test_what_is_drawn_at_random_repeats_itself_and_is_the_same_task_for_a_group(qwen):
    talks = [[f"{n}" + END] * 2 for n in range(4)]

    def draw(seed=0):
        rows, scores = play(qwen, talks, rows=[HI, HI], max_turns=2, seed=seed, **node("Drawn"))
        said = [talk.messages[1]["content"] for talk in rows.completions]
        return [str(prompt) for prompt in rows.prompts], said, scores.of("Drawn").tolist()

    prompts, said, rewards = draw()
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert said[0] == said[1] != said[2] == said[3]
    assert len({*rewards}) > 1
    assert draw() == (prompts, said, rewards) != draw(seed=1)


def test_what_functions_alone_draw_at_random_is_the_same_for_a_group(qwen):
    def roll() -> int:
        """Rolls a die."""
        return random.randrange(10**9)

    talks = [[use("roll"), "." + END]] * 4
    rows, _ = play(qwen, talks, rows=[HI, HI], tools=[roll])
    said = [results(talk) for talk in rows.completions]
    assert said[0] == said[1] != said[2] == said[3]


def test_reset_gets_a_seed_that_its_group_shares(qwen):
    rows, _ = play(qwen, [TALK] * 4, rows=[HI, HI], max_turns=1, _component_="played.GuessGym")
    seeds = [int(prompt.text.removeprefix("Hi ")) for prompt in rows.prompts]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3] and all(0 <= n < 2**31 for n in seeds)


# --- What fails costs its row ----------------------------------------------------------------


def bad_rows(ways, moments):
    return [HI | {"how": how, "when": when} for when in moments for how in ways]


@pytest.mark.slow
def test_a_failure_at_any_moment_costs_its_row_alone(qwen):
    ways = ["raise", "exit", "hang", "die", "block"]
    rows = [*bad_rows(ways, ["reset", "step", "get_reward"]), HI | {"how": "fine", "when": "-"}]
    kept = Reward("kept", lambda completions, **columns: [1.0] * len(completions))
    found, scores = play(
        qwen, [TALK] * len(rows), rows=rows, rewards=[kept], timeout=1.5, **node("Bad")
    )
    ends = [talk.ended for talk in found.completions]
    assert ends == ["tool_failed"] * (len(rows) - 1) + ["done"]
    for name in ("Bad", "kept"):
        assert scores.of(name).isnan().tolist() == [True] * (len(rows) - 1) + [False]
    errors = [talk.error for talk in found.completions]
    assert errors[-1] is None
    line = 1 + open(hosted.__file__).read().split("\n").index(
        '                    raise KeyError("state")'
    )
    raised = f"environment Bad: step() raised KeyError: 'state' (hosted.py:{line})"
    assert errors[len(ways)] == raised and "no answer within 1.5 s" in errors[len(ways) + 2]
    assert all(talk.messages for talk in found.completions)


def test_a_constructor_that_fails_costs_its_row(qwen, tmp_path):
    found, scores = play(qwen, [TALK] * 4, **node("NeverMade", folder=str(tmp_path)))
    assert sorted(talk.ended for talk in found.completions) == ["done"] * 2 + ["tool_failed"] * 2
    assert any("no more of these (hosted.py:" in (talk.error or "") for talk in found.completions)


def test_if_all_fail_the_rollout_ends_with_the_error_and_its_line(qwen):
    rows = bad_rows(["raise"], ["reset", "step"])
    with pytest.raises(
        ValueError, match=r"All 4 conv.* reset\(\) raised KeyError: 'state' \(hosted.py:\d+\)"
    ):
        play(qwen, [TALK] * 4, rows=rows, **node("Bad"))


def test_wrong_moves_and_prompts_that_do_not_fit_end_no_run(qwen):
    rows, _ = play(qwen, [[use("nothing"), "." + END]], tools=["hosted.meet"])
    assert rows.completions[0].failed_calls == 1
    rows, _ = play(qwen, [TALK], max_response_tokens=7990, _component_="played.GuessGym")
    assert (rows.completions[0].ended, rows.completions[0].error) == ("tool_failed", None)


def test_a_row_that_is_late_from_the_start_has_a_message(qwen, monkeypatch):
    def nothing(engine, request):
        n = request.num_rows
        none, zeros = torch.zeros(n, 1, dtype=torch.bool), torch.zeros(n, 1)
        ends = torch.zeros(n, dtype=torch.long)
        return Samples(zeros.long(), ends, torch.ones(n, dtype=torch.bool), none, zeros, zeros)

    monkeypatch.setattr(ScriptedEngine, "generate", nothing)
    last = Reward(
        "last", lambda completions, **columns: [len(c[-1]["content"]) for c in completions]
    )
    rows, scores = play(qwen, [TALK] * 2, rewards=[last], **node("Scored"))
    assert [talk.ended for talk in rows.completions] == ["deadline"] * 2
    assert scores.of("last").tolist() == [0, 0]


def test_a_misspelt_environment_leaves_its_row_out(tmp_path, caplog):
    lines = [{"prompt": "Guess.", "answer": "7", "environment": name} for name in "abba"]
    lines.insert(2, {**lines[0], "environment": "bb"})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    guess = "torchtune_grpo.environments.examples.GuessNumber"
    source = (
        f"dataset={{_component_: torchtune_grpo.data.RLDataset, source: {tmp_path}/data.jsonl}}"
    )
    folder = Path(models.__file__).parents[1] / "tiny_llama"
    changes = [f"environment={{a: {guess}, b: {guess}}}", source, "rewards=[]", "eval_dataset=null"]
    changes += [f"model_dir={folder}", f"output_dir={tmp_path}", "evaluation.every_n_steps=null"]
    dataset = Run(load_config("tiny_arithmetic_grpo", changes)).dataset
    assert [item["columns"]["environment"] for item in dataset] == [*"abba"]
    assert "column 'environment' is 'bb', and has to name one of a, b" in caplog.text


@pytest.mark.slow
def test_importing_does_not_count_as_a_calls_time(qwen, tmp_path, monkeypatch):
    """This module takes longer to import than a call may take."""
    slow = "import time\nimport hosted\ntime.sleep(2.5)\nclass Slow(hosted.OldLoop): pass\n"
    (tmp_path / "hosted_slowly.py").write_text(slow)
    monkeypatch.syspath_prepend(tmp_path)
    _, scores = play(qwen, [TALK] * 2, _component_="hosted_slowly.Slow", timeout=1.0)
    assert scores.of("Slow").tolist() == [1, 1]


@pytest.mark.slow
def test_a_thousand_rows_have_a_process_each(qwen):
    """Which has an event loop, too."""
    _, scores = play(qwen, [TALK] * 1000, **node("OldLoop"))
    assert scores.of("OldLoop").tolist() == [1] * 1000


# --- Forms and names -------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["message", "inline"])
def test_gyms_four_values_are_read(form, qwen):
    talk = ["a" + END, "bc" + END] if form == "message" else ["a", "bc"]
    rows, scores = play(qwen, [talk], form=form, **node("Four"))
    assert scores.of("Four").tolist() == [0.5] and rows.completions[0].ended == "done"


def test_an_empty_list_is_an_empty_observation(qwen):
    nothing = node("Nothing")
    rows, scores = play(qwen, [["a" + END, "bc" + END]], **nothing)
    assert scores.of("Nothing").tolist() == [1] and rows.completions[0].ended == "done"
    rows, scores = play(qwen, [["a", "bc"]], form="inline", **nothing)
    assert scores.of("Nothing").tolist() == [0.5] and rows.completions[0].ended == "answered"
    assert [talk.text for talk in rows.completions] == ["a"]


def test_two_values_of_step_are_refused_with_their_place(qwen):
    with pytest.raises(ValueError, match=r"step\(\) raised .* 2 values; return .*hosted.py"):
        play(qwen, [TALK], **node("Two"))


def test_tools_may_be_called_as_an_environments_own_methods(qwen):
    talks = [[use("reset"), use("get_reward"), "." + END]]
    rows, _ = play(qwen, talks, tools=["hosted.reset", "hosted.get_reward"])
    assert results(rows.completions[0]) == ["a tool", "another"]
    rows, _ = play(qwen, [[use("step", direction="up"), "." + END]], **node("TrlStep"))
    assert results(rows.completions[0]) == ["up 1"]


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(
        ConfigError, match=r"tools\[1\]=hosted.meet: another tool is called meet, too"
    ):
        make_kinds(EnvironmentConfig(), ["hosted.meet", "hosted.meet"])
    with pytest.raises(ConfigError, match="and a method of hosted.Scored are both called add"):
        settings = EnvironmentConfig(_component_="hosted.Scored")
        make_kinds(settings, ["hosted.Scored.add"], {"tools.0": hosted.Scored().add})


# --- Of libraries, as their users write them ---------------------------------------------------


@pytest.mark.slow
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


@pytest.mark.slow
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


# --- The end ---------------------------------------------------------------------------------


def children_of(folder):
    """The processes that environments have started."""
    names = [name for name in os.listdir(folder) if name.startswith("child")]
    return [int(name.partition("-")[2]) for name in names]


def test_a_step_in_progress_may_end_before_close(tmp_path):
    keys = EnvironmentConfig(**node("Logged", folder=str(tmp_path), slowness=0.3))
    (kind,) = make_kinds(keys, []).values()
    sessions = [kind.session() for _ in range(3)]
    for session in sessions:
        session.reset({}, 0)
    for session in sessions:
        in_thread(session.answer, Turn("Hi"))
    while not (tmp_path / "step").exists():
        time.sleep(0.01)
    kind.close()
    assert len([*tmp_path.glob("closed-*")]) == len(children_of(tmp_path)) == 3


def test_what_a_late_environment_has_started_ends_at_once_and_others_live_on(tmp_path):
    keys = node("Logged", folder=str(tmp_path), slowness=1000.0, timeout=0.5)
    (kind,) = make_kinds(EnvironmentConfig(**keys), []).values()
    try:
        late, other = kind.session(), kind.session()
        children = []
        for session in (late, other):
            session.reset({}, 0)
            noted = {int(path.name.partition("-")[2]) for path in tmp_path.glob("child-*")}
            children += noted - {*children}
        with pytest.raises(ObjectLost, match="no answer within 0.5 s; its processes were killed"):
            late.answer(Turn("Hi"))
        kind.drop(late)
        assert wait_until(lambda: not is_alive(children[0]))
        assert is_alive(children[1]) and other.reset({}, 0) is None
    finally:
        kind.close()


@pytest.mark.slow
def test_close_has_five_seconds(qwen, tmp_path):
    begun = time.monotonic()
    keys = node("Logged", folder=str(tmp_path), seconds=1000.0, max_turns=2)
    play(qwen, [TALK] * 4, **keys)
    assert time.monotonic() - begun < 20
    children = children_of(tmp_path)
    assert len(children) == 4 and not any(map(psutil.pid_exists, children))
