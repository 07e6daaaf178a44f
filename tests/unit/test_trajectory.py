"""Prompts and samples become rows, joined without gaps and cut without loss."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from trajectories import make_trajectory

from torchtune_grpo.data import PromptBatch
from torchtune_grpo.rollout import (
    RolloutRequest,
    SamplingParams,
    decode_responses,
    roll_out,
    row_keys,
)
from torchtune_grpo.trajectory import Samples, Trajectory, join_rows, length_mask


def samples_of(responses: list[list[int]], width: int) -> Samples:
    padded = torch.tensor([r + [99] * (width - len(r)) for r in responses])
    lengths = torch.tensor([len(r) for r in responses])
    truncated = torch.zeros(len(responses), dtype=torch.bool)
    return Samples(padded, lengths, truncated, padded.float(), padded.float())


def test_join_rows_puts_each_response_right_behind_its_prompt():
    tokens, prompt_lengths = join_rows(
        [[1, 2], [3, 4, 5]],
        samples_of([[11], [12, 13, 14], [15, 16], [17]], width=3),
    )
    assert prompt_lengths.tolist() == [2, 2, 3, 3]
    assert tokens.tolist() == [
        [1, 2, 11, 0, 0],
        [1, 2, 12, 13, 14],
        [3, 4, 5, 15, 16],
        [3, 4, 5, 17, 0],
    ]


def test_join_rows_clears_what_stands_behind_a_response():
    """Its longest row may be shorter than the width of the samples."""
    tokens, _ = join_rows([[5]], samples_of([[6, 7], []], width=9))
    assert tokens.tolist() == [[5, 6, 7], [5, 0, 0]]


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


def test_completion_ids_hold_the_whole_response_trained_on_or_not():
    rows = trajectory_of([2, 1], [1, 3], trained_on=[0, 2])
    assert rows.completion_ids == [[2], [5, 6, 7]]


def test_roll_out_joins_samples_prompts_texts_and_columns():
    """By hand: the second response has its stop token, the first was cut."""
    samples = replace(
        samples_of([[1, 2, 3], [4, 26]], width=3), truncated=torch.tensor([True, False])
    )
    samples = replace(samples, behaviour_logprobs=samples.sampler_logprobs + 1)
    asked: list[RolloutRequest] = []

    class Engine:
        def generate(self, request: RolloutRequest) -> Samples:
            asked.append(request)
            return samples

    rows = roll_out(
        Engine(),
        PromptBatch(
            tokens=[[8, 9]],
            indices=[5],
            prompts=["why"],
            columns={"answer": ["7"]},
            uses=[2],
            places=[9],
        ),
        tokenizer=_Tokenizer(),
        group_size=2,
        params=SamplingParams(max_generated_tokens=3, stop_strings=("bc",)),
        prefill=">",
        seed=1,
        step=2,
    )
    (request,) = asked
    assert request.prompts == [[8, 9]] and request.stop_tokens == [26]
    assert request.decode([2, 3]) == "bc"
    keys = row_keys(seed=1, step=2, prompt_indices=[5], group_size=6)[4:]  # the third time
    assert torch.equal(request.keys, keys)
    assert rows.tokens.tolist() == [[8, 9, 1, 2, 3], [8, 9, 4, 26, 0]]
    assert rows.completion_ids == [[1, 2, 3], [4, 26]]
    assert rows.prompt_lengths.tolist() == [2, 2] and rows.response_lengths.tolist() == [3, 2]
    assert rows.response_mask.tolist() == [[True] * 3, [True, True, False]]
    assert rows.truncated.tolist() == [True, False]
    assert rows.sampler_logprobs.tolist() == [[1, 2, 3], [4, 26, 99]]
    assert rows.behaviour_logprobs.tolist() == [[2, 3, 4], [5, 27, 100]]
    assert rows.prompts == ["why"] * 2 and rows.completions == [">abc", ">d"]
    assert rows.columns == {"answer": ["7"] * 2} and rows.prompt_indices.tolist() == [5, 5]


class _Tokenizer:
    """Knows 1..26 as letters; any other id is unknown, as beyond a real tokenizer's vocabulary."""

    stop_tokens = [26]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        if not all(1 <= i <= 26 for i in token_ids):
            raise KeyError(token_ids)
        return "".join(chr(96 + i) for i in token_ids)


def test_decoding_survives_unknown_ids_and_drops_only_the_final_stop_token():
    samples = samples_of([[1, 2, 26], [1, 500, 2, 3], [26]], width=4)
    texts = decode_responses(_Tokenizer(), samples, stop_tokens=[26], prefill=">")
    assert texts == [">ab", ">a\ufffdbc", ">"]
