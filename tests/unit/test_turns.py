"""Responses of several turns equal a plain loop that runs the model's full forward for each token.

Every token, mask and log-prob, and everything that the replies are asked about. A reply depends on
the row and its response alone; when it comes, and how many rows are sampled at once, changes
nothing.
"""

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from decode_attention import decode_attention  # noqa: F401
from policies import build_policy
from rollouts import (
    LATE,
    STOPS,
    Scripted,
    assert_same_samples,
    context,
    native,
    plain,
    random_prompts,
    request,
    responses,
    text_of,
    with_turns,
)
from test_rollout import HostRecorder

from torchtune_grpo.rollout import batch, paused
from torchtune_grpo.rollout.attention import ReplyAttention
from torchtune_grpo.rollout.cache import GroupCache
from torchtune_grpo.rollout.native import NativeEngine

CASES = {
    "plain": ("qwen", {}),
    "window": ("window", {}),
    "greedy": ("lora", {"temperature": 0.0}),
    "strings": ("dora", {"stops": (7,), "stop_strings": ("ca", "bf", "nb"), "decode": text_of}),
    "penalty": ("llama", {"repetition_penalty": 1.5, "min_new_tokens": 6}),
    "filters": ("llama", {"temperature": 1.4, "top_k": 20, "top_p": 0.9}),
    "row_limit": ("lora_output", {"row_limit": 20}),
    "long": ("qwen", {"max_generated_tokens": GroupCache.BLOCK + 9, "stops": (7, 11, 30)}),
}


@cache
def case(name: str):
    """A model, a request, and what the plain loop makes of it."""
    kind, options = CASES[name]
    model, options = build_policy(kind), dict(options)
    limit = options.pop("row_limit", 130 if name == "long" else 60)
    options = {"group_size": 2, "stops": STOPS, "max_generated_tokens": 24, **options}
    asked = replace(request(random_prompts([5, 2, 9]), **options), row_limit=limit)
    return model, asked, *plain(model, with_turns(asked, Scripted()))


def assert_plays(engine: NativeEngine, name: str, late=LATE["at_once"]) -> Scripted:
    _, asked, expected, questions = case(name)
    turns = Scripted(late)
    got = engine.generate(with_turns(asked, turns))
    assert_same_samples(got, expected)
    assert torch.equal(got.sampled, expected.sampled)
    given = (torch.arange(got.sampled.shape[1]) < got.lengths[:, None]) & ~got.sampled
    assert not got.sampler_logprobs[given].any() and not got.behaviour_logprobs[given].any()
    assert sorted(turns.asked) == sorted(questions)
    return turns


@pytest.mark.parametrize("name", CASES)
def test_conversations_equal_a_plain_loop(name, monkeypatch):
    """With few rows at once and many, both attentions, replayed steps, and rows that overshoot."""
    model, asked, expected, questions = case(name)
    turns = [sum(each[0] == row for each in questions) for row in range(asked.num_rows)]
    assert (
        (max(turns) > 1 or name == "row_limit")
        and expected.truncated.any()
        and not expected.truncated.all()
    )
    for rows in (2, None):
        assert_plays(native(model, max_rows=rows), name)
    monkeypatch.setitem(batch.POLL_STEPS, "cpu", 3)
    assert_plays(native(model, max_rows=3), name)
    engine = native(model, max_rows=4)
    recorder = HostRecorder(engine)
    assert_plays(engine, name, LATE["late"])
    assert recorder.recorded


@pytest.mark.parametrize("rows", [1, 2, 3, None])
def test_what_is_computed_side_by_side_depends_on_tokens_alone(rows, monkeypatch):
    """Not on when replies come, unless that is asked for; the samples never do."""
    done: list[list[int]] = []
    decode, feed = batch.GroupRollout.decode, batch.GroupRollout._sample_after_replies

    def noted(function):
        def call(self, *answered):
            done.append([row.number for row in (answered[0] if answered else self.live)])
            function(self, *answered)

        return call

    monkeypatch.setattr(batch.GroupRollout, "decode", noted(decode))
    monkeypatch.setattr(batch.GroupRollout, "_sample_after_replies", noted(feed))

    def batches(late: str, reply_steps: int | None) -> list[list[int]]:
        done.clear()
        engine = native(case("plain")[0], max_rows=rows, reply_steps=reply_steps)
        turns = assert_plays(engine, "plain", LATE[late])
        assert turns.waits or late in ("at_once", "last_first")
        return list(done)

    for reply_steps in (1, 6, 16):
        at_once, *others = (batches(late, reply_steps) for late in LATE)
        for other in others:
            assert other == at_once
    assert batches("at_once", None) != batches("late", None)


def test_answered_rows_are_fed_together(monkeypatch):
    """A pass over the few tokens of one reply costs about as much as a decoding step."""
    model = build_policy("qwen")
    asked = replace(request(random_prompts([5] * 8), group_size=4, stops=STOPS), row_limit=60)
    fed = []

    def counted(rows, cache):
        fed.append(len(rows))
        return ReplyAttention(rows, cache)

    monkeypatch.setattr(batch, "ReplyAttention", counted)
    got = native(model, reply_steps=None).generate(with_turns(asked, Scripted()))
    together, answered = len(fed), sum(fed)
    monkeypatch.setattr(paused, "LIVE_PER_ANSWERED", 10**6)
    again = native(model, reply_steps=None).generate(with_turns(asked, Scripted()))
    assert_same_samples(again, got)
    assert sum(fed) == 2 * answered and len(fed) - together >= 2 * together


@pytest.mark.parametrize("rows", [2, None])
def test_a_deadline_cuts_off_rows_that_wait_for_a_reply(rows, monkeypatch):
    """Their last turn has ended, but not they; without live rows the clock is still looked at."""
    model, asked, expected, _ = case("plain")
    clock = itertools.count()  # it ticks at every look
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    turns = Scripted(lambda row, turn: 10**9)
    engine = NativeEngine(context(model, max_rows=rows, deadline=500))
    got = engine.generate(with_turns(asked, turns))
    assert got.truncated.all() and turns.waits > 300
    firsts = {row: response for row, response, _ in turns.asked}
    assert len(firsts) == len(turns.asked) == min(5, 2 * (rows or 3))
    for row, response in enumerate(responses(got)):
        assert response == firsts.get(row, response)
        assert response == responses(expected)[row][: len(response)]


def test_slots_of_rows_that_pause_are_in_the_memory_budget():
    model, asked, *_ = case("plain")
    engine, with_pauses = native(model, max_rows=2), with_turns(asked, Scripted())
    bound = engine.cache_bytes(with_pauses, rows=2)
    engine.generate(with_pauses)
    held = sum(tensor.nbytes for tensor in engine._cache.tensors())
    # Four prompts (all three) and four rows, with one for padding, of 64 tokens each.
    assert held == 2 * 2 * 2 * 8 * 4 * (3 * 64 + 5 * 64) < bound
    assert engine.cache_bytes(asked, rows=2) < bound
