"""Which prompts a step takes, and that its rollout neither waits nor samples in vain."""

import random
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policies import VOCAB, build_policy
from steps import make_scores

from torchtune_grpo.advantages import AGGREGATIONS, NORMALIZATIONS, reward_advantages
from torchtune_grpo.config.keys import DynamicSamplingConfig
from torchtune_grpo.dynamic_sampling import passes_filter, wanted_prompts
from torchtune_grpo.rollout import (
    NativeEngine,
    RolloutConfig,
    RolloutRequest,
    SamplingParams,
    TorchtuneEngine,
    row_keys,
)

NAN = float("nan")


def by_rounds(fails: list[bool], *, batch_size: int, rounds: int) -> int:
    """As DAPO does it: as many prompts as groups of the last round failed, and again."""
    count, new = batch_size, range(batch_size)
    for _ in range(rounds):
        new = range(count, count + sum(fails[place] for place in new))
        count += len(new)
    return count


@given(
    fails=st.lists(st.booleans(), min_size=20, max_size=20),
    batch_size=st.integers(1, 5),
    rounds=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_in_whatever_order_groups_end_the_same_prompts_come(fails, batch_size, rounds, seed):
    """Each may begin as soon as it is known that it will come, and no other ever does."""
    expected = by_rounds(fails, batch_size=batch_size, rounds=rounds)
    order, failed, begun = random.Random(seed), set(), batch_size
    open_groups = list(range(batch_size))
    while open_groups:
        place = open_groups.pop(order.randrange(len(open_groups)))
        failed |= {place} if fails[place] else set()
        wanted = wanted_prompts(failed, batch_size=batch_size, rounds=rounds)
        assert begun <= wanted <= expected
        open_groups += range(begun, wanted)
        begun = wanted
    assert begun == expected
    passed = expected - len(failed)
    assert passed <= batch_size
    if rounds and passed < batch_size:  # only because the rounds were over
        assert by_rounds(fails, batch_size=batch_size, rounds=rounds - 1) < expected


def group(total, first=None):
    total = torch.tensor(total)
    scores = torch.stack([total if first is None else torch.tensor(first), total], dim=1)
    return replace(make_scores(), names=["a", "b"], scores=scores, total=total)


@pytest.mark.parametrize(
    ("keys", "total", "first", "passes"),
    [
        ({}, [1.0, 0.0, 0.0], None, True),
        ({}, [0.1, 0.1, 0.1], None, False),
        ({}, [1.0, 0.0, 0.0], [1.0, 1.0, 1.0], True),
        ({"reward": "a"}, [1.0, 0.0, 0.0], [1.0, 1.0, 1.0], False),
        ({"reward": "a"}, [1.0, 1.0, 1.0], [1.0, 0.0, NAN], True),
        ({"reward": "a"}, [1.0, 0.0, 0.0], [1.0, 1.0, NAN], False),
        ({"reward": "a"}, [1.0, 0.0, 0.0], [NAN, NAN, NAN], False),
        ({"min_pass_rate": 0.25}, [1.0, 0.0, 0.0, 0.0], None, True),
        ({"min_pass_rate": 0.26}, [1.0, 0.0, 0.0, 0.0], None, False),
        ({"max_pass_rate": 0.25}, [1.0, 0.0, 0.0, 0.0], None, True),
        ({"max_pass_rate": 0.24}, [1.0, 0.0, 0.0, 0.0], None, False),
    ],
)
def test_the_filter(keys, total, first, passes):
    settings = DynamicSamplingConfig(max_resamples=1, **keys)
    assert passes_filter(group(total, first), settings) is passes


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_advantages_are_those_of_the_groups_that_are_kept(normalization, aggregation):
    """The others are no part of the batch, whose spread may scale; there may be none left."""
    total = torch.tensor([0.0, 1.0, 1.0, 0.0, 5.0, 9.0, 2.0, 2.5])
    settings = {"group_size": 2, "normalization": normalization, "aggregation": aggregation}

    def advantages(rows, **kept):
        of_rewards = (total[rows], torch.stack([total, total**2], dim=1)[rows], torch.ones(2))
        return reward_advantages(*of_rewards, **settings, **kept)

    kept = torch.tensor([True, True, False, False, False, False, True, True])
    some = advantages(slice(None), kept=kept)
    assert torch.equal(some[kept], advantages(kept)) and not some[~kept].any()
    assert some[kept].all()
    nothing = advantages(slice(None), kept=torch.zeros(8, dtype=torch.bool))
    assert torch.equal(nothing, torch.zeros(8))


class Judge:
    """Fails some prompts, a little after they have ended, and takes note of what it is told."""

    def __init__(self, *, fails, batch_size, rounds, delay):
        self.fails, self.sizes, self.delay = fails, (batch_size, rounds), delay
        self.failed, self.judged, self.samples, self.order = set(), set(), {}, []

    def ended(self, prompt, samples):
        self.samples[prompt] = samples
        self.order.append(prompt)

        def judge():
            self.failed |= {prompt} & self.fails
            self.judged.add(prompt)

        threading.Timer(self.delay, judge).start()

    def allowed(self):
        return wanted_prompts(self.failed, batch_size=self.sizes[0], rounds=self.sizes[1])

    def is_final(self):
        return len(self.judged) == self.allowed()

    def wait(self):
        time.sleep(0.001)


def request(prompts, admission=None):
    params = SamplingParams(max_generated_tokens=16, temperature=2.0)
    keys = row_keys(seed=0, step=0, prompt_indices=range(len(prompts)), group_size=2)
    stops = list(range(0, VOCAB, 9))
    return RolloutRequest(
        prompts=prompts,
        group_size=2,
        params=params,
        stop_tokens=stops,
        keys=keys,
        admission=admission,
    )


@pytest.mark.parametrize("engine", [NativeEngine, TorchtuneEngine])
@pytest.mark.parametrize("settings", [RolloutConfig(), RolloutConfig(max_rows=2)])
def test_engines_sample_what_is_admitted_as_if_nothing_else_were(engine, settings):
    prompts = [[1 + n, 2, 3] for n in range(9)]
    policy = build_policy()
    whole = engine(policy, settings).generate(request(prompts))
    judge = Judge(fails={0, 2, 5}, batch_size=4, rounds=3, delay=0.005)
    some = engine(policy, settings).generate(request(prompts, judge))
    assert judge.allowed() == 7  # for 0 and 2 come 4 and 5, for 5 comes 6
    assert sorted(judge.order) == [*range(7)]
    assert torch.equal(some.lengths, whole.lengths[:14]) and len(set(some.lengths.tolist())) > 3
    for row, length in enumerate(some.lengths):
        assert torch.equal(some.responses[row, :length], whole.responses[row, :length])
        own = judge.samples[row // 2]
        assert torch.equal(own.responses[row % 2, :length], whole.responses[row, :length])
        assert own.lengths[row % 2] == length


def test_a_replacement_is_sampled_beside_rows_that_still_run():
    """Of four groups one has a row of the full length; what replaces the others ends before it."""
    prompts = [[1 + n, 2, 3] for n in range(9)]
    engine = NativeEngine(build_policy(), RolloutConfig())
    lengths = engine.generate(request(prompts)).lengths.view(-1, 2).amax(dim=1)
    last = int(lengths[:4].argmax())
    judge = Judge(fails={*range(4)} - {last}, batch_size=4, rounds=1, delay=0.0)
    engine.generate(request(prompts, judge))
    shortest = min(range(4, 7), key=lambda prompt: lengths[prompt])
    assert judge.order.index(shortest) < judge.order.index(last)


@pytest.mark.parametrize("engine", [NativeEngine, TorchtuneEngine])
def test_after_a_deadline_what_may_begin_ends_without_a_token(engine):
    prompts = [[1 + n, 2, 3] for n in range(9)]
    judge = Judge(fails={*range(9)}, batch_size=3, rounds=2, delay=0.0)
    settings = RolloutConfig(deadline=1e-9)
    samples = engine(build_policy(), settings).generate(request(prompts, judge))
    assert len(samples.lengths) == 18 and samples.truncated.all()
    assert sorted(judge.order) == [*range(9)]
