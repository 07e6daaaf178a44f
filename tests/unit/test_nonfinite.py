"""A loss or gradient that is not finite: no step, a file, and an end after several in a row."""

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchtune_grpo.training.optimizer import NonFiniteError, NonFiniteGuard, total_grad_norm
from torchtune_grpo.trajectory import Trajectory

BAD = [torch.nan, torch.inf, -torch.inf]


def make_trajectory() -> Trajectory:
    return Trajectory(
        tokens=torch.arange(12).view(2, 6),
        prompt_indices=torch.tensor([5, 5]),
        places=torch.tensor([5, 5]),
        prompt_lengths=torch.tensor([2, 3]),
        response_lengths=torch.tensor([3, 1]),
        response_mask=torch.tensor([[True, True, True], [True, False, False]]),
        truncated=torch.tensor([False, True]),
        sampler_logprobs=torch.zeros(2, 3),
        behaviour_logprobs=torch.zeros(2, 3),
        prompts=["p", "p"],
        completions=["c", "d"],
        columns={"answer": ["1", "1"]},
        advantages=torch.tensor([1.0, -1.0]),
    )


def decide(guard: NonFiniteGuard, *, loss: float = 0.5, grad: float = 1.0, step: int = 1) -> bool:
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[0.0, grad]])
    return guard.allows_step(
        loss=torch.tensor(loss),
        grad_norm=total_grad_norm(model.parameters()),
        model=model,
        trajectory=make_trajectory(),
        step=step,
    )


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("what", ["loss", "grad"])
def test_the_step_is_refused_and_the_batch_kept(tmp_path, what, bad):
    guard = NonFiniteGuard(tmp_path)
    assert decide(guard) and not (tmp_path / "nonfinite").exists()
    assert not decide(guard, **{what: bad}, step=7)
    record = torch.load(tmp_path / "nonfinite/step_000007_1.pt", weights_only=True)
    assert record["parameters"] == (["weight"] if what == "grad" else [])
    assert record["completions"] == ["c", "d"] and record["columns"] == {"answer": ["1", "1"]}
    assert record["tokens"].equal(make_trajectory().tokens)
    assert record["advantages"].tolist() == [1, -1] and record["step"] == 7
    assert str(record["loss" if what == "loss" else "grad_norm"]) in ("nan", "inf", "-inf")
    assert guard.skipped == 1


def test_only_an_unbroken_row_stops_the_run(tmp_path):
    guard = NonFiniteGuard(tmp_path)
    assert [decide(guard, loss=loss) for loss in (torch.nan, torch.nan, 1.0, torch.nan)] == [
        False,
        False,
        True,
        False,
    ]
    assert not decide(guard, grad=torch.inf)
    with pytest.raises(NonFiniteError, match="3 in a row, and the run stops"):
        decide(guard, grad=torch.inf)
    assert guard.skipped == 5 and len(list((tmp_path / "nonfinite").iterdir())) == 5


def test_the_norm_is_that_of_clipping():
    model = torch.nn.Linear(3, 2)
    assert total_grad_norm(model.parameters()) == 0
    model(torch.ones(1, 3)).square().sum().backward()
    norm = total_grad_norm(model.parameters())
    assert norm == torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def _rank(rank: int, folder: str, answers) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    guard = NonFiniteGuard(Path(folder))
    losses = [1.0, torch.nan if rank == 1 else 1.0, 1.0]
    answers.put((rank, [decide(guard, loss=loss, step=s) for s, loss in enumerate(losses)]))
    dist.destroy_process_group()


def test_all_ranks_decide_alike(tmp_path):
    """Only rank 1 sees the NaN; if rank 0 stepped, their weights would differ from then on."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, str(tmp_path), answers)) for r in range(2)]
    for process in ranks:
        process.start()
    decisions = dict(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join()
    assert decisions == {0: [True, False, True], 1: [True, False, True]}
    assert sorted(p.name for p in (tmp_path / "nonfinite").iterdir()) == [
        "step_000001_1_rank_0.pt",
        "step_000001_1_rank_1.pt",
    ]


def test_counts_survive_a_restart(tmp_path):
    """A run that is killed and resumed after every second bad step ends all the same."""
    first = NonFiniteGuard(tmp_path)
    assert not decide(first, loss=torch.nan) and not decide(first, loss=torch.nan)
    resumed = NonFiniteGuard(tmp_path)
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(NonFiniteError, match="3 in a row"):
        decide(resumed, loss=torch.nan)
    assert resumed.skipped == 3
    assert len(list((tmp_path / "nonfinite").iterdir())) == 3  # none is overwritten
