"""Sets of rewards: what a config builds, how each is called, and what its failures cost."""

import asyncio
import copy
import math
import os
import re
import signal
import threading
import time
from decimal import Decimal
from functools import partial

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from processes import on_two_ranks, wait_until

from torchtune_grpo import rewards as shipped_rewards
from torchtune_grpo.data import RLDataset
from torchtune_grpo.data.dataset import collate_prompts
from torchtune_grpo.machine import loop
from torchtune_grpo.rewards import (
    OverlongPenalty,
    Reward,
    RewardFailure,
    RewardSet,
    TrainerState,
    math_correctness_reward,
)

STATE = TrainerState(global_step=3, max_steps=10)
FORMAT = "torchtune_grpo.rewards.math_format_reward"
ISOLATED = {"_component_": FORMAT, "isolation": "process"}
VERL = f"{__name__}.compute_score"


def score(*rewards, n=4, share=1.0, **more):
    named = [r if isinstance(r, Reward) else Reward(f"r{i}", r) for i, r in enumerate(rewards)]
    rewards = RewardSet(named, max_failure_share=share)
    texts = [f"c{i}" for i in range(n)]
    more = {"columns": {}, **more}
    scores = rewards(prompts=[f"p{i}" for i in range(n)], completions=texts, **more)
    rewards.close()
    return scores


def returns(value):
    def reward(prompts, completions, **columns):
        return value

    return reward


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


class Bonus:
    """A reward with state."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, prompts, completions, **columns):
        return [self.value] * len(completions)


def test_accepted_return_types():
    """Bools, ints, tensors and tuples are numbers; dtype does not follow torch's default."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        values = ([True, False], (2, None), torch.tensor([0.1, 3]))
        scores = score(*map(returns, values), n=2)
        # As TRL takes them.
        numbers = ([torch.tensor(1), np.bool_(True)], [Decimal("1"), np.float32(1)])
        alike = score(*map(returns, (*numbers, torch.ones(2, 1), np.ones((2, 1)))), n=2)
        assert alike.scores.eq(1).all()
    finally:
        torch.set_default_dtype(torch.float32)
    assert scores.scores[:, 0].tolist() == [1.0, 0.0]
    assert scores.scores[0, 1] == 2 and scores.scores[1, 1].isnan()
    assert {scores.scores.dtype, scores.weights.dtype, scores.total.dtype} == {torch.float32}
    nothing = score(returns([]), returns([]), n=0)
    assert nothing.scores.shape == (0, 2) and nothing.total.shape == (0,)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "'r0' returned 1 values for 2 completions"),
        (None, "'r0' returned NoneType"),
        ("12", "'r0' returned str"),
        (torch.ones(2, 2), r"'r0' returned \[1.0, 1.0\] at index 0"),
        (["1.0", 1.0], "'r0' returned '1.0' at index 0"),
        ([1.0, 1j], "'r0' returned 1j at index 1"),
    ],
)
def test_what_a_reward_may_not_return(value, message):
    """Whatever share of failures is allowed: it is a bug in the reward, async or not."""

    async def asynchronous(prompts, completions, **columns):
        return value

    for reward in (returns(value), asynchronous):
        with pytest.raises(ValueError, match=message):
            score(reward, n=2)


def test_a_reward_may_change_all_that_it_gets():
    """For the rows of its group, the next reward and the next step, all is as it was."""
    seen = []

    def vandal(*, prompts, completions, completion_ids, steps, entry, **columns):
        assert not columns
        seen.append(copy.deepcopy((prompts, completions, completion_ids, steps, entry)))
        count = len(completions)
        for row in range(count):
            assert steps[row].pop() == 2
            entry[row]["deep"]["list"].clear()
            prompts[row][0]["content"] = completions[row][0]["content"] = "changed"
            completion_ids[row].append(7)
        for values in (prompts, completions, completion_ids, steps, entry):
            values.clear()
        return [0.0] * count

    steps, entry = [1, 2], {"deep": {"list": [3]}}  # the rows of a group share them
    given = {"steps": [steps] * 2, "entry": [entry] * 2}
    rewards = [Reward(name, vandal, format="chat") for name in "ab"]
    for _ in range(2):
        score(*rewards, n=2, columns=given, completion_ids=[[5], [6]])
    turns = [[[{"role": role, "content": f"{x}{i}"}] for i in (0, 1)] for role, x in ROLES]
    assert seen == [(*turns, [[5], [6]], [[1, 2]] * 2, [{"deep": {"list": [3]}}] * 2)] * 4
    assert (steps, entry) == ([1, 2], {"deep": {"list": [3]}})


ROLES = [("user", "p"), ("assistant", "c")]


def test_missing_column():
    message = r"'r0' needs the column 'answer', .* has \['answers', 'x'\]\. Did you mean answers\?"
    with pytest.raises(ValueError, match=message):
        score(math_correctness_reward, columns={"answers": ["1"] * 4, "x": [1] * 4})
    rewards = RewardSet.from_config([{"_component_": FORMAT, "only": {"levle": 1}}])
    with pytest.raises(ValueError, match=r"only={'levle': 1}, .* Did you mean level\?"):
        rewards(prompts=["p"], completions=["c"], columns={"level": [1]})


def scaled_length(prompts, completions, *, scale=1.0, limit=None, **columns):
    return [scale * min(len(text), limit or len(text)) for text in completions]


def test_keyword_arguments_are_bound():
    """For a function by partial, for a class by its constructor; the weight is not among them."""
    node = {"_component_": f"{__name__}.scaled_length", "scale": 2, "limit": 3, "weight": 0.5}
    bonus = {"_component_": f"{__name__}.Bonus", "value": "${seven}", "name": "bonus"}
    cfg = OmegaConf.create({"rewards": [node, bonus], "seven": 7.0})
    rewards = RewardSet.from_config(cfg.rewards)
    scores = rewards(prompts=["p"], completions=["abcd"], columns={"limit": [1]})
    assert scores.names == ["scaled_length", "bonus"]
    assert scores.scores.tolist() == [[6.0, 7.0]]  # the config's limit, not the column's
    assert scores.total.tolist() == [10.0]


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ([{"_component_": "no.such.thing"}], r"rewards\[0\]\._component_=no.such.thing"),
        (
            [{"_component_": "math_corectness_reward"}],
            "mean torchtune_grpo.rewards.math_correctness",
        ),
        ([{"_component_": "math.pi"}], "math.pi: not a class or function"),
        ([{"_component_": FORMAT}] * 2, r"rewards\[1\]\.name=.math_format_reward."),
        ([{"_component_": FORMAT, "weight": math.nan}], r"rewards\[0\]\.weight=nan: .* finite"),
        ([{"_component_": FORMAT, "wieght": 0.1}], r"wieght=0.1.* weight\?.*It takes name, weight"),
        ([{"_component_": FORMAT, "prompts": 1}], r"rewards\[0\]\.prompts=1"),
        ([{"_component_": f"{__name__}.Bonus", "valeu": 1}], r"valeu=1.*Did you mean value\?"),
        ([{"_component_": FORMAT, "format": "chatml"}], "format='chatml': .* 'text' or 'chat'"),
        ([{**ISOLATED, "isolation": "thread"}], "isolation='thread': should be 'process'"),
        ([{**ISOLATED, "timeout": 0}], r"rewards\[0\].timeout=0: should be greater than 0"),
        ([{**ISOLATED, "workers": 0}], r"rewards\[0\].workers=0: should be greater than or equal"),
        ([{**ISOLATED, "fromat": "chat"}], r"fromat='chat': .*Did you mean format\?"),
        ([{"_component_": FORMAT, "timeout": 3}], "no such argument. It goes with isolation: proc"),
        ([{"_component_": f"{__name__}.Bonus"}], r"rewards\[0\]: could not construct .*'value'"),
        (
            [{"_component_": VERL}],
            r"compute_score has no argument `completions`; write f\(prompts, ",
        ),
    ],
)
def test_configs_that_are_refused(cfg, message):
    for given in (cfg, OmegaConf.create(cfg)):
        with pytest.raises(ValueError, match=message):
            RewardSet.from_config(given)


def test_functions_that_cannot_be_called_as_rewards_are_called():
    def no_columns(prompts, completions):
        return [0.0]

    with pytest.raises(ValueError, match=r"rewards\[0\] \(r\) takes only .*not further columns"):
        RewardSet([Reward("r", no_columns)])
    with pytest.raises(ValueError, match=r"rewards\[0\] \(r\) has no signature"):
        RewardSet([Reward("r", 3)])


class Wordy(OverlongPenalty):
    """A user's, which takes texts like the one it is made of."""

    def __call__(self, prompts, completions, **columns):
        words = [[0] * len(text.split()) for text in completions]
        return super().__call__(prompts, completions, completion_ids=words)


def test_what_a_reward_gets_follows_from_the_row_unless_it_has_a_format(llama3_tokenizer):
    """All messages, as in TRL, or the last one's text, which rewards of the package take."""
    system = {"role": "system", "content": "Be brief."}
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    turns.append({"role": "user", "content": "Sure?"})
    answer, seen = "The answer is 2. " * 2, {}

    def given(prompt):
        row = {"prompt": prompt, "answer": "2"}
        data = RLDataset(llama3_tokenizer, rows=[row], system_prompt="Be brief.")
        batch = collate_prompts([*data])
        return dict(prompts=batch.prompts, completions=[answer], columns=batch.columns)

    def spy(prompts, completions, **columns):
        seen["own"] = prompts, completions
        return [0.0] * len(prompts)

    right = Reward("right", partial(math_correctness_reward, strict=False))
    wordy = Reward("wordy", Wordy(max_length=16, cache=16), 0.1)
    rewards = RewardSet([Reward("own", spy), right, wordy])
    scores, said = rewards(**given(turns)), [[{"role": "assistant", "content": answer}]]
    assert seen["own"] == ([[system, *turns]], said)
    assert scores.scores.tolist() == [[0.0, 1.0, -0.5]]
    RewardSet([Reward("own", spy, format="text")])(**given(turns))
    assert seen["own"] == (["Sure?"], [answer]) and type(seen["own"][0][0]) is str
    RewardSet([Reward("own", spy, format="chat")])(**given("1+1?"))
    assert seen["own"] == ([[system, turns[0]]], said)

    def length(prompts, completions, **columns):
        return [float(len(re.findall("2", text))) for text in completions]

    with pytest.raises(RewardFailure, match="set format: text in its node"):
        RewardSet([Reward("length", length)])(**given(turns))


def test_all_shipped_rewards_read_text():
    names = [n for n in shipped_rewards.__all__ if re.search(".(Reward|Penalty|_reward)$", n)]
    assert len(names) >= 13
    for name in names:
        assert Reward(name, getattr(shipped_rewards, name)).format == "text"


def test_async_rewards_wait_side_by_side():
    """Beside a sync one, while a loop runs, as in a notebook; none goes on before all are there."""
    here = []

    def sync(prompts, completions, **columns):
        while len(here) < 4:
            time.sleep(0.001)
        here.append("sync")
        return [0.0] * len(prompts)

    class Waiter:
        async def __call__(self, prompts, completions, **columns):
            here.append("async")
            while len(here) < 5:
                await asyncio.sleep(0.001)
            return [2.0] * len(prompts)

    async def notebook():
        return score(Waiter(), sync, *[Waiter().__call__] * 3)

    loop.run(asyncio.sleep(0))  # its thread stays
    threads = threading.active_count()
    assert asyncio.run(notebook()).scores[0].tolist() == [2, 0, 2, 2, 2]
    assert wait_until(lambda: threading.active_count() == threads)


def test_what_an_async_reward_makes_in_one_step_serves_the_next():
    """As a connection does, a semaphore that has been waited for belongs to an event loop."""
    slots, loops = asyncio.Semaphore(1), set()

    async def wait():
        async with slots:
            await asyncio.sleep(0.01)
            return 1.0

    async def reward(prompts, completions, **columns):
        loops.add(asyncio.get_running_loop())
        return await asyncio.gather(*(wait() for _ in completions))

    for _ in range(2):
        assert score(reward, reward).total.tolist() == [2.0] * 4
    assert len(loops) == 1


def fails_on(*bad, error=KeyError):
    def reward(prompts, completions, **columns):
        if any(text in completions for text in bad):
            raise error("mine")
        return [float(text[1:]) for text in completions]

    return reward


@pytest.mark.parametrize(
    ("golds", "wrong"), [("9999", "7 where answer is 9"), ("7999", None), ("7777", None)]
)
def test_missing_answers_are_counted_and_a_wrong_one_shown_if_none_is_right(golds, wrong):
    texts = ["<answer>7</answer>", "I think", "<answer>8</answer>", ""]
    rewards = RewardSet([Reward("math", math_correctness_reward)])
    scores = rewards(prompts=["p"] * 4, completions=texts, columns={"answer": [*golds]})
    assert scores.metrics == [("math/no_answer", 0.5)] and scores.wrong == wrong


def test_notes_of_calls_one_by_one_are_joined():
    """Notes of the batch's call that raised do not count; one name may come twice."""

    def reward(prompts, completions, log_extra, log_metric, **columns):
        log_metric("called", len(completions))
        if completions != ["c1"]:
            log_extra("said", completions)
        if "c2" in completions:
            raise KeyError("mine")
        return [0.0] * len(completions)

    scores = score(reward, trainer_state=STATE)
    assert scores.extra == {"said": ["c0", None, "c2", "c3"]}
    assert scores.metrics == [("r0/called", 1.0)] * 4
    both = score(reward, reward, n=1, trainer_state=STATE)
    assert both.extra == {"r0/said": ["c0"], "r1/said": ["c0"]}


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e39, 10**400, ValueError("x")])
def test_what_is_no_finite_number_is_a_failure(value):
    """Not a None: it counts as an error and as its group's mean; by default it stops everything."""

    def reward(prompts, completions, **columns):
        return [1.0, value, None, 2.0]

    scores = score(reward, share=0.25, group_size=4)
    assert scores.failed[:, 0].tolist() == [False, True, False, False]
    assert scores.scores.isnan()[:, 0].tolist() == [False, True, True, False]
    assert [*map(str, scores.total.tolist())] == ["1.0", "1.5", "nan", "2.0"]
    with pytest.raises(RewardFailure, match="'r0' failed on 1 of 4 completions, first at index 1"):
        score(reward, share=0.0)


def test_a_reward_may_set_an_alarm():
    """As math_verify does for its time limit; only a process's main thread can."""

    def reward(prompts, completions, **columns):
        before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, before)
        return [1.0] * len(completions)

    assert score(reward, reward_async).total.tolist() == [3.0] * 4


async def reward_async(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    return [2.0] * len(completions)


class NoText(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__
    __notes__ = property(__str__)


ENDS = [SystemExit, asyncio.CancelledError, GeneratorExit, StopIteration, NoText]


def raising(way, error):
    """A reward that raises for c1: when it is called, is awaited, or in a task of its own."""
    reward = fails_on("c1", error=error)

    async def task(texts):
        await asyncio.sleep(0)
        return reward(None, texts)

    async def awaited(prompts, completions, **columns):
        if way == "task":
            await asyncio.create_task(task(completions))
        return await task(completions)

    return reward if way == "called" else awaited


@pytest.mark.parametrize(
    ("way", "error"),
    [
        *((way, error) for way in ("called", "awaited", "task") for error in ENDS),
        *((way, KeyboardInterrupt) for way in ("awaited", "task")),  # called, it is the run's
    ],
)
def test_whatever_is_raised_costs_only_that_sample(way, error):
    """sys.exit in a task ends its event loop; other rewards, and later steps, go on."""
    for _ in range(2):
        scores = score(raising(way, error), reward_async, share=0.5)
        assert scores.failed.tolist() == [[False, False], [True, False], *2 * [[False, False]]]
        assert scores.total.tolist() == [2, 2, 4, 5]
    with pytest.raises(RewardFailure, match=f"index 1: .*({error.__name__}|StopIteration)"):
        score(raising(way, error), share=0.0)


def test_the_message_shows_control_characters_and_where(caplog):
    def reward(prompts, completions, **columns):
        raise ValueError(f"no number in \x1b[2J{completions[0]}\x9b\n\tsecond line")

    line = reward.__code__.co_firstlineno + 1
    shown = "ValueError: no number in \\x1b[2Jc0\\x9b\n\tsecond line"
    score(reward, n=1)
    assert caplog.messages == [
        f"The reward 'r0' failed on 1 of 1 completions, first at index 0: {shown} "
        f"(test_reward_calls.py:{line})"
    ]
    with pytest.raises(RewardFailure) as raised:
        score(reward, n=1, share=0.0)
    told = [str(raised.value), *raised.value.__notes__]
    assert all(shown in text and "\x1b" not in text for text in told)
    # What Python would print as it is.
    assert raised.value.__cause__ is None and raised.value.__context__ is None


def test_all_ranks_judge_failures_alike(tmp_path):
    """Only rank 1 fails: on 2 of its 4 completions, which are 2 of 8."""

    def said_by(rank):
        def reward(prompts, completions, log_extra, *, case, **columns):
            if case == "contract" and rank == 1:
                log_extra("said", completions[1:])
            if case == "exit" and rank == 1:
                raise SystemExit(0)
            bad = ("c1", "c2") if rank == 1 else ()
            return fails_on(*bad)(prompts, completions)

        said = []
        for case, share in (("half", 0.25), ("half", 0.24), ("contract", 1.0), ("exit", 0.4)):
            try:
                scores = score(partial(reward, case=case), share=share, trainer_state=STATE)
                said.append(scores.failed.sum().item())
            except (ValueError, RewardFailure) as error:
                said.append("\n".join([str(error), *getattr(error, "__notes__", ())]))
        return said

    said = on_two_ranks(said_by, folder=tmp_path)
    assert [said[rank].pop(0) for rank in range(2)] == [0, 2]  # 0.25 of all is borne
    assert said[0] == said[1]
    failed, contract, ended = said[0]
    assert "'r0' failed on 2 of 8 completions, first at index 1 of rank 1: KeyError" in failed
    assert 'raise error("mine")' in failed
    assert "log_extra('said', ...) got 3 values for 4 completions" in contract
    assert "failed on 4 of 8 completions, first at index 0 of rank 1: SystemExit: 0" in ended


def test_which_reward_decides():
    """The one that is named; else the first that declares so and trains; else the first."""

    def length(completions, **columns):
        return [float(len(text)) for text in completions]

    own, known = Reward("length", length), Reward("correct", math_correctness_reward)
    watched = Reward("watched", math_correctness_reward, weight=0.0)

    def decided(*rewards, **named):
        found = RewardSet(rewards, **named)
        return found.decider.name, found.decider.measure, found.gate(None)

    assert decided(own, known) == ("correct", "accuracy", "correct")
    assert decided(watched, own, known) == ("correct", "accuracy", "correct")
    assert decided(own, known, deciding="length") == ("length", "accuracy", "length")
    assert decided(watched, own, deciding="watched") == ("watched", "accuracy", "watched")
    assert decided(watched, own) == ("watched", "accuracy", None)  # it is only logged
    assert decided(own, Reward("other", length)) == ("length", "length", None)
    with pytest.raises(ValueError, match="deciding_reward=lenght: no reward of this name"):
        RewardSet([own], deciding="lenght")


# --- The process's one asyncio loop ------------------------------------------------------------


async def identity():
    await asyncio.sleep(0)
    return asyncio.get_running_loop(), threading.current_thread()


def test_calls_from_many_threads_at_once_share_one_loop(monkeypatch):
    monkeypatch.setattr(loop, "_loop", None)  # none has been made yet
    together, found = threading.Barrier(16), []

    def call():
        together.wait()
        found.append(loop.run(identity()))

    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 and len(set(found)) == 1
    assert loop.run(identity()) == found[0]


def test_a_task_that_exits_behind_a_call_ends_nothing():
    before = loop.run(identity())

    async def leave_a_task():
        async def leave():
            raise SystemExit(3)

        task = asyncio.create_task(leave())
        del task
        return "done"

    assert loop.run(leave_a_task()) == "done"
    assert loop.run(identity()) == before


def test_a_forked_process_has_a_loop_of_its_own():
    loop.run(identity())
    if (child := os.fork()) == 0:
        try:
            loop.run(identity())
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
