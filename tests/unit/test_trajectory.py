"""Rows are joined without gaps, cut and stacked without loss."""

import pytest
import torch

from torchtune_grpo.data import step_indices
from torchtune_grpo.rollout._text import decode_responses
from torchtune_grpo.trajectory import Samples, Trajectory, join_rows, length_mask


def samples_of(responses: list[list[int]], width: int) -> Samples:
    padded = torch.tensor([r + [99] * (width - len(r)) for r in responses])
    lengths = torch.tensor([len(r) for r in responses])
    truncated = torch.zeros(len(responses), dtype=torch.bool)
    return Samples(padded, lengths, truncated, padded.float(), padded.float())


def test_join_rows_puts_each_response_right_behind_its_prompt():
    tokens, prompt_lengths = join_rows(
        prompt_tokens=torch.tensor([[9, 1, 2], [3, 4, 5]]),
        prompt_lengths=torch.tensor([2, 3]),
        samples=samples_of([[11], [12, 13, 14], [15, 16], [17]], width=3),
    )
    assert prompt_lengths.tolist() == [2, 2, 3, 3]
    assert tokens.tolist() == [
        [1, 2, 11, 0, 0],
        [1, 2, 12, 13, 14],
        [3, 4, 5, 15, 16],
        [3, 4, 5, 17, 0],
    ]


def trajectory_of(prompts: list[int], responses: list[int], first: int = 0) -> Trajectory:
    rows = len(prompts)
    total = max(p + r for p, r in zip(prompts, responses, strict=True))
    mask = length_mask(torch.tensor(responses), max(responses))
    return Trajectory(
        tokens=torch.arange(rows * total).view(rows, total) + first,
        prompt_lengths=torch.tensor(prompts),
        response_mask=mask,
        truncated=torch.zeros(rows, dtype=torch.bool),
        sampler_logprobs=mask.float(),
        prompts=[f"p{first + i}" for i in range(rows)],
        completions=[f"c{first + i}" for i in range(rows)],
        columns={"answer": [first + i for i in range(rows)]},
        advantages=torch.arange(rows).float() + first,
    )


def test_select_takes_rows_in_the_order_asked_for_and_no_texts():
    part = trajectory_of([2, 2, 1], [1, 2, 4]).select(torch.tensor([2, 0]))
    assert part.advantages.tolist() == [2, 0]
    assert part.response_lengths.tolist() == [4, 1]
    assert part.old_logprobs is None and part.completions == []


def test_step_indices_pass_over_the_data_without_repeats_or_gaps():
    """7 rows, 3 a step: 7 steps are exactly 3 passes, each a permutation, each a different one."""
    kw = dict(prompts_per_step=3, dataset_size=7, seed=1)
    flat = [i for step in range(7) for i in step_indices(step=step, **kw)]
    passes = [flat[0:7], flat[7:14], flat[14:21]]
    assert all(sorted(p) == list(range(7)) for p in passes)
    assert passes[0] != passes[1] != passes[2]
    assert step_indices(step=5, **kw) == flat[15:18]  # no state: any step can be asked for
    assert step_indices(step=0, **{**kw, "seed": 2}) != flat[:3]
    assert step_indices(step=1, **kw, shuffle=False) == [3, 4, 5]
    with pytest.raises(ValueError, match="dataset"):
        step_indices(step=0, prompts_per_step=8, dataset_size=7, seed=0)


class _Tokenizer:
    """Knows 1..26 as letters; any other id is unknown, as beyond a real tokenizer's vocabulary."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        if not all(1 <= i <= 26 for i in token_ids):
            raise KeyError(token_ids)
        return "".join(chr(96 + i) for i in token_ids)


def test_decoding_survives_unknown_ids_and_drops_only_the_final_stop_token():
    samples = samples_of([[1, 2, 26], [1, 500, 2, 3], [26]], width=4)
    texts = decode_responses(_Tokenizer(), samples, stop_tokens=[26], prefill=">")
    assert texts == [">ab", ">a\ufffdbc", ">"]
