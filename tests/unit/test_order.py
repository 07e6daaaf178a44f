"""Each rank works on prompts of its own, and together they take those of one larger rank."""

import pytest

from torchtune_grpo.data import step_indices


@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_take_different_prompts_and_together_those_of_one_rank(shuffle):
    """11 rows and 6 a step of both ranks: a pass ends within every second step."""
    of_all = {"dataset_size": 11, "seed": 3, "shuffle": shuffle}
    for step in range(8):
        ranks = [
            step_indices(step=step, prompts_per_step=3, rank=rank, world_size=2, **of_all)
            for rank in range(2)
        ]
        together = step_indices(step=step, prompts_per_step=6, **of_all)
        assert ranks[0] + ranks[1] == together
        first_of_a_pass = -6 * step % 11  # rows of this step before it
        if not 0 < first_of_a_pass < 6:  # a row may come again only in the next pass
            assert not set(ranks[0]) & set(ranks[1])


def test_without_shuffling_by_hand():
    ranks = [
        step_indices(
            step=1, prompts_per_step=2, dataset_size=5, seed=0, shuffle=False, rank=r, world_size=2
        )
        for r in range(2)
    ]
    assert ranks == [[4, 0], [1, 2]]


def test_too_few_rows_for_the_ranks_are_told():
    with pytest.raises(ValueError, match=r"batch_size \* 2 ranks = 6 .* has only 5; lower batch_s"):
        step_indices(step=0, prompts_per_step=3, dataset_size=5, seed=0, world_size=2)
