"""Every number that a step logs, by hand; and of which groups it records the completions."""

import math
import statistics
import time
from dataclasses import replace

import pytest
import torch
from steps import make_recorder, make_scores, make_trajectory

from torchtune_grpo.loss import LossOutput
from torchtune_grpo.monitor import recorder as recorder_module
from torchtune_grpo.monitor.metrics import StepMetrics
from torchtune_grpo.trajectory import Completion, Trajectory


def of_rollout(total=(1.0, 3.0, 5.0, 5.0), **changes):
    """Return the metrics of a rollout whose rows have these totals."""
    metrics, scores = StepMetrics(), replace(make_scores(), total=torch.tensor(total))
    metrics.add_rollout(replace(make_trajectory(), **changes), scores, group_size=2)
    return metrics.compute()


def test_what_a_rollout_logs():
    expected = {
        "reward": 3.5,
        "reward_std": statistics.stdev([1, 3, 5, 5]),
        "reward_std_in_group": statistics.stdev([1, 3]) / 2,  # and 0 of the second group
        "frac_reward_zero_std": 0.5,
        "frac_informative_groups": 0.5,
        "frac_groups_same_text": 0.0,
        "rewards/a/mean": 7 / 3,
        "rewards/a/std": statistics.stdev([1, 2, 4]),
        "rewards/a/errors": 0.25,
        "rewards/a/none": 0.0,
        "rewards/b/mean": 0.5,
        "rewards/b/std": 0.0,
        "rewards/b/errors": 0.0,
        "rewards/b/none": 0.25,
        "rewards/a/depth": 4.5,
        "time/rewards/a": 0.25,
        "time/rewards/b": 0.5,
        "completions/mean_length": 2.0,
        "completions/min_length": 1.0,
        "completions/max_length": 3.0,
        "completions/clipped_ratio": 0.25,
        "completions/mean_terminated_length": 2.0,
        "completions/min_terminated_length": 1.0,
        "completions/max_terminated_length": 3.0,
        "num_tokens": 12.0,
        "sampling/entropy": 1.0,
        # Four first tokens of which all mass was kept, three second ones of which half was: what
        # is not trained on does not count.
        "sampling/kept_mass": (4 * 1 + 3 * 0.5) / 7,
    }
    assert of_rollout() == pytest.approx(expected)


def test_a_reply_within_a_response_is_neither_sampled_nor_trained_on():
    """Row 2 has three tokens, the second of them a reply; its last one is not trained on."""
    rows = make_trajectory()
    rows.sampled[2, 1] = rows.response_mask[2, 1] = False
    values = of_rollout(sampled=rows.sampled, response_mask=rows.response_mask)
    assert values["completions/mean_length"] == 7 / 4
    assert values["completions/max_length"] == 2 and values["num_tokens"] == 12
    assert values["sampling/kept_mass"] == pytest.approx((4 * 1 + 2 * 0.5) / 6)
    assert rows.response_ids[2] == [9, 10, 11] and rows.completion_ids[2] == [9, 11]
    groups, _ = take(rows, make_scores())
    assert [record["tokens"] for record in groups[1]] == [2, 2]


def test_groups_that_teach_and_groups_of_equal_texts():
    """A reward that failed teaches nothing; rewards that cancel in the total may still teach."""
    values = of_rollout(total=(1.0, 1.0, 5.0, 5.0), advantages=torch.zeros(4))
    assert (values["frac_informative_groups"], values["frac_reward_zero_std"]) == (0, 1)
    assert values["reward_std_in_group"] == 0
    values = of_rollout(total=(1.0, 1.0, 5.0, 5.0), completions=[*map(Completion.of, "abaa")])
    assert values["frac_informative_groups"] == values["frac_groups_same_text"] == 0.5


def test_what_trains_no_token_adds_nothing():
    """No rows, or none of their tokens."""
    trajectory, metrics = make_trajectory(), StepMetrics()
    nothing = trajectory.select(torch.zeros(4, dtype=torch.bool))
    output = LossOutput(torch.tensor(0.0), {"kl": torch.tensor(0.0)})
    metrics.add_update(output, entropy=torch.empty(0, 3), response_mask=nothing.response_mask)
    metrics.add_sampling_gap(nothing, torch.empty(0, 3))
    masked = replace(trajectory, response_mask=torch.zeros(4, 3, dtype=torch.bool))
    metrics.add_sampling_gap(masked, torch.full((4, 3), -1.5))
    assert metrics.compute() == {}


def test_a_loss_that_is_not_finite_is_not_hidden():
    metrics = StepMetrics()
    for loss in (1.0, math.nan):
        metrics.add_sum("loss", torch.tensor(loss), 1.0)
    assert math.isnan(metrics.compute()["loss"])


def test_timers_add_up_and_tokens_are_counted_by_the_second():
    metrics = StepMetrics()
    metrics.add_max("step_time", 10.0)
    metrics.add_values("completions/mean_length", torch.tensor([20.0, 40.0]))
    assert metrics.compute()["tokens_per_second"] == 6.0  # also if a fork does not time its rollout
    for _ in range(2):
        with metrics.timer("time/rollout"):
            time.sleep(0.02)
    found = metrics.compute()
    assert 0.04 <= found["time/rollout"] < 1
    assert found["rollout/tokens_per_second"] == pytest.approx(60 / found["time/rollout"])
    assert found["tokens_per_second"] == 6.0


def take(trajectory, scores, *, step=1, **more):
    """The chosen groups and all groups' results of one rollout."""
    return make_recorder(trajectory, scores, **more).take(step)


def test_a_record_has_the_numbers_of_the_step():
    trajectory, scores = make_trajectory(), make_scores()
    trajectory = replace(trajectory, columns={"gold": ["1", "1", "2", "2" * 3000]})
    recorder = make_recorder(trajectory, scores)
    logprobs = trajectory.sampler_logprobs - torch.tensor([0.25, 0.5, 99.0])
    recorder.update(trajectory, logprobs)
    (first, second), summary = recorder.take(5)
    assert summary == {"prompt_index": [7, 3], "pass_rate": [1.5, 4.0], "reward": [2.0, 5.0]}
    assert first[1] == {
        "step": 5,
        "prompt_index": 7,
        "sample": 1,
        "prompt": "p",
        "columns": {"gold": "1"},
        "completion": "b",
        "tokens": 2,
        "ended": "stop_string",
        "reward": 3.0,
        "rewards": {"a": 2.0, "b": 0.5},
        "failed": [],
        "advantage": pytest.approx(-0.7),
        "sampler_logprob": -1.0,
        "trainer_logprob": -1.375,
        "extra": {"note": "x"},
    }
    assert first[0]["rewards"] == {"a": 1.0, "b": None} and first[0]["failed"] == []
    assert second[1]["rewards"] == {"a": None, "b": 0.5} and second[1]["failed"] == ["a"]
    assert len(second[1]["columns"]["gold"]) == 2000
    nothing = {"prompt_index": [], "pass_rate": [], "reward": []}
    assert recorder.take(6) == ([], nothing)  # it has forgotten them


def test_mean_logprobs_leave_out_what_is_not_trained_on():
    """A tool's output in the middle of a response, and all of a response that was cut off."""
    trajectory = make_trajectory()
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1], [0, 0, 0]]).bool()
    sampler = torch.tensor([-1.0, -99.0, -3.0]).expand(4, 3)
    rows = replace(trajectory, response_mask=mask, sampler_logprobs=sampler)
    recorder = make_recorder(rows, make_scores())
    recorder.update(rows, 2 * sampler)
    groups, _ = recorder.take(1)
    found = {
        r["completion"]: (r["sampler_logprob"], r["trainer_logprob"]) for g in groups for r in g
    }
    assert found == {"a": (-1, -2), "b": (-50, -100), "c": (-2, -4), "d": (None, None)}


def many(count, informative):
    """Groups of two of prompts 0, 1, ...; only some teach."""
    part = make_trajectory().select(torch.tensor([0, 1]))
    parts = [
        replace(
            part,
            prompt_indices=torch.tensor([i, i]),
            step_indices=torch.tensor([i, i]),
            advantages=torch.tensor([1.0, -1.0]) * (i in informative),
        )
        for i in range(count)
    ]
    scores = make_scores()
    tensors = {
        name: torch.cat([getattr(scores, name)[:2]] * count)
        for name in ("scores", "total", "failed")
    }
    return Trajectory.join(parts), replace(scores, **tensors, extra={})


def test_informative_groups_come_first_and_the_choice_is_the_seeds():
    def chosen(step):
        groups, _ = take(*many(8, informative={2, 5}), num_groups=3, step=step)
        return [group[0]["prompt_index"] for group in groups]

    taken = [chosen(step) for step in range(40)]
    assert all(set(indices[:2]) == {2, 5} for indices in taken)
    assert {indices[2] for indices in taken} == {0, 1, 3, 4, 6, 7}  # no prompt is favoured
    assert chosen(7) == taken[7]


def test_ranks_choose_as_one(monkeypatch):
    """Two ranks with half of the groups each record what one rank with all of them records."""
    trajectory, scores = many(8, informative={1, 2, 6})
    one, sent = take(trajectory, scores), []

    def gather(value):
        sent.append(value)
        return list(sent)

    monkeypatch.setattr(recorder_module, "gather_over_ranks", gather)
    for half in (slice(0, 8), slice(8, 16)):
        names = ("scores", "total", "failed")
        part = replace(scores, **{name: getattr(scores, name)[half] for name in names})
        two = take(trajectory.select(torch.arange(16)[half]), part)
    assert two == one


def test_rows_that_a_fork_has_moved_or_dropped_are_found_by_their_tokens():
    trajectory = make_trajectory()
    recorder = make_recorder(trajectory, make_scores())
    kept = torch.tensor([3, 0])
    logprobs = torch.tensor([[-3.0] * 3, [-7.0] * 3])
    recorder.update(trajectory.select(kept), logprobs)
    groups, _ = recorder.take(1)
    found = {record["completion"]: record["trainer_logprob"] for g in groups for record in g}
    assert found == {"a": -7.0, "b": None, "c": None, "d": -3.0}


def test_no_groups_are_kept_but_all_are_counted():
    groups, summary = take(make_trajectory(), make_scores(), num_groups=0)
    assert not groups and summary["prompt_index"] == [7, 3]
