"""Which groups of a step are recorded, and that their records are the run's own numbers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from steps import make_scores, make_trajectory

from torchtune_grpo.monitor import recorder as recorder_module
from torchtune_grpo.monitor.recorder import GroupRecorder
from torchtune_grpo.trajectory import Trajectory


def make_recorder(num_groups=2):
    cfg = SimpleNamespace(log_groups=num_groups, grpo_samples=2, max_generated_tokens=3, seed=0)
    return GroupRecorder(cfg, decider="a", stop_tokens=(1,))


def take(trajectory, scores, *, step=1, num_groups=2):
    """The chosen groups and all groups' results of one rollout."""
    recorder = make_recorder(num_groups)
    recorder.rollout(trajectory, scores)
    return recorder.take(step)


def test_a_record_has_the_numbers_of_the_step():
    trajectory, scores = make_trajectory(), make_scores()
    trajectory = replace(trajectory, columns={"gold": ["1", "1", "2", "2" * 3000]})
    recorder = make_recorder()
    recorder.rollout(trajectory, scores)
    logprobs = trajectory.sampler_logprobs - torch.tensor([0.25, 0.5, 99.0])
    recorder.update(trajectory, logprobs)
    (first, second), summary = recorder.take(5)
    assert summary == {"prompt_index": [7, 3], "pass_rate": [1.5, 2.0], "reward": [2.0, 5.0]}
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


def test_why_a_response_ended():
    trajectory = replace(
        make_trajectory(),
        response_lengths=torch.tensor([1, 2, 3, 2]),
        truncated=torch.tensor([False, False, True, True]),
    )
    assert trajectory.tokens[0, 1] == 1
    groups, _ = take(trajectory, make_scores())
    ends = [record["ended"] for group in groups for record in group]
    assert ends == ["stop_token", "stop_string", "length", "deadline"]


def many(count, informative):
    """Groups of two of prompts 0, 1, ...; only some teach."""
    part = make_trajectory().select(torch.tensor([0, 1]))
    parts = [
        replace(
            part,
            prompt_indices=torch.tensor([i, i]),
            places=torch.tensor([i, i]),
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
    trajectory, scores = make_trajectory(), make_scores()
    recorder = make_recorder()
    recorder.rollout(trajectory, scores)
    kept = torch.tensor([3, 0])
    logprobs = torch.tensor([[-3.0] * 3, [-7.0] * 3])
    recorder.update(trajectory.select(kept), logprobs)
    groups, _ = recorder.take(1)
    found = {record["completion"]: record["trainer_logprob"] for g in groups for record in g}
    assert found == {"a": -7.0, "b": None, "c": None, "d": -3.0}


def test_no_groups_are_kept_but_all_are_counted():
    groups, summary = take(make_trajectory(), make_scores(), num_groups=0)
    assert not groups and summary["prompt_index"] == [7, 3]
