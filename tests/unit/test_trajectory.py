"""Prompts and samples become rows, joined without gaps and cut without loss."""

from dataclasses import replace
from unittest.mock import Mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from trajectories import make_trajectory

from torchtune_grpo.data import PromptBatch
from torchtune_grpo.rollout import SamplingParams, roll_out, row_keys
from torchtune_grpo.trajectory import Samples, Trajectory, length_mask


def trajectory_of(prompts: list[int], responses: list[int], trained_on: list[int]) -> Trajectory:
    rows = len(prompts)
    random = make_trajectory(prompts, responses)
    mask = length_mask(torch.tensor(trained_on), max(responses))
    return replace(
        random,
        tokens=torch.arange(random.tokens.numel()).view_as(random.tokens),
        response_mask=mask,
        sampler_logprobs=mask.float(),
        behaviour_logprobs=mask.float(),
        prompts=[f"p{i}" for i in range(rows)],
        completions=[f"c{i}" for i in range(rows)],
        columns={"answer": list(range(rows))},
        advantages=torch.arange(rows).float(),
    )


def test_select_takes_rows_with_their_texts_by_index_or_mask():
    """In the order asked for; or none at all."""
    whole = trajectory_of([2, 2, 1], [1, 2, 4], trained_on=[1, 2, 4])
    for rows, expected in (([2, 0], [2, 0]), ([False, True, True], [1, 2])):
        part = whole.select(torch.tensor(rows))
        assert part.advantages.tolist() == expected and part.ref_logprobs is None
        assert part.response_lengths.tolist() == [[1, 2, 4][row] for row in expected]
        assert part.prompts == [f"p{row}" for row in expected]
        assert part.completions == [f"c{row}" for row in expected]
        assert part.columns == {"answer": expected}
    for nothing in (torch.zeros(3, dtype=torch.bool), torch.empty(0, dtype=torch.long)):
        part = whole.select(nothing)
        assert part.num_rows == 0 and part.response_mask.shape == (0, 4)
        assert (part.prompts, part.columns, part.completion_ids) == ([], {"answer": []}, [])


def equal(left: Trajectory, right: Trajectory) -> bool:
    texts = ("prompts", "completions", "columns")
    return (
        left.tensors().keys() == right.tensors().keys()
        and all(torch.equal(value, right.tensors()[n]) for n, value in left.tensors().items())
        and all(getattr(left, name) == getattr(right, name) for name in texts)
    )


@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4))
def test_join_undoes_select(picks):
    """Any rows, cut anywhere: the same as selecting them at once."""
    whole = trajectory_of([2, 2, 1, 3], [1, 2, 4, 0], trained_on=[1, 0, 4, 0])
    parts = [whole.select(torch.tensor(rows, dtype=torch.long)) for rows in picks]
    joined = Trajectory.join(parts)
    assert equal(joined, whole.select(torch.tensor(sum(picks, []), dtype=torch.long)))


def test_join_pads_to_the_longest():
    """[prompt 2, response 1] and [1, 2 and 0]: T 3, L 2."""
    left = trajectory_of([2], [1], trained_on=[1])
    right = trajectory_of([1, 1], [2, 0], trained_on=[2, 0])
    for parts, first in (((left, right), 0), ((right, left), 2)):
        joined = Trajectory.join(parts)
        assert joined.tokens[first].tolist() == [0, 1, 2]
        assert joined.response_mask[first].tolist() == [True, False]
        assert joined.sampler_logprobs[first].tolist() == [1.0, 0.0]
        assert joined.response_mask.dtype == torch.bool and joined.ref_logprobs is None
        assert sorted(joined.prompts) == ["p0", "p0", "p1"]
    wide = replace(left, tokens=torch.tensor([[7, 8, 9, 0]]))
    assert Trajectory.join([left, wide]).tokens.tolist() == [[0, 1, 2, 0], [7, 8, 9, 0]]


class _Tokenizer:
    """Knows 1..26 as letters; any other id is unknown, as beyond a real tokenizer's vocabulary."""

    stop_tokens = [26]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        if not all(1 <= i <= 26 for i in token_ids):
            raise KeyError(token_ids)
        return "".join(chr(96 + i) for i in token_ids)


def test_roll_out_joins_samples_prompts_texts_and_columns():
    """By hand: only the first response is cut, and the third has a token that no text stands for.

    The longest row is shorter than prompt and samples together.
    """
    responses = torch.tensor([[1, 2, 3, 99], [4, 26, 99, 99], [2, 500, 3, 26], [26, 99, 99, 99]])
    samples = Samples(
        responses=responses,
        lengths=torch.tensor([3, 2, 4, 1]),
        truncated=torch.tensor([True, False, False, False]),
        sampler_logprobs=responses.float(),
        behaviour_logprobs=responses.float() + 1,
    )
    engine = Mock(generate=Mock(return_value=samples))
    rows = roll_out(
        engine,
        PromptBatch(
            tokens=[[7, 8, 9], [6]],
            indices=[5, 0],
            prompts=["why", "how"],
            columns={"answer": ["7", "8"]},
            uses=[2, 0],
            places=[9, 4],
        ),
        tokenizer=_Tokenizer(),
        group_size=2,
        params=SamplingParams(max_generated_tokens=3, stop_strings=("bc",)),
        prefill=">",
        seed=1,
        step=2,
    )
    (request,) = engine.generate.call_args.args
    assert request.prompts == [[7, 8, 9], [6]] and request.stop_tokens == [26]
    assert request.decode([2, 3]) == "bc"
    keys = row_keys(seed=1, step=2, prompt_indices=[5], group_size=6)[4:]  # the third time
    assert torch.equal(request.keys[:2], keys)
    assert rows.tokens.tolist() == [
        [7, 8, 9, 1, 2, 3],
        [7, 8, 9, 4, 26, 0],
        [6, 2, 500, 3, 26, 0],
        [6, 26, 0, 0, 0, 0],
    ]
    assert rows.completion_ids == [[1, 2, 3], [4, 26], [2, 500, 3, 26], [26]]
    assert rows.prompt_lengths.tolist() == [3, 3, 1, 1]
    assert rows.response_lengths.tolist() == [3, 2, 4, 1]
    assert rows.response_mask.sum(dim=1).tolist() == [3, 2, 4, 1]
    assert rows.truncated.tolist() == [True, False, False, False]
    assert torch.equal(rows.sampler_logprobs, samples.sampler_logprobs)
    assert torch.equal(rows.behaviour_logprobs, samples.behaviour_logprobs)
    assert rows.prompts == ["why", "why", "how", "how"]
    assert rows.completions == [">abc", ">d", ">b\ufffdc", ">"]
    assert rows.columns == {"answer": ["7", "7", "8", "8"]}
    assert rows.prompt_indices.tolist() == [5, 5, 0, 0] and rows.places.tolist() == [9, 9, 4, 4]
