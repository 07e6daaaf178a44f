"""Weights after optimizer steps do not depend on how the work is cut, to 1e-5 in float32.

The recipe's own class runs in this process, from config to saved checkpoint. With SGD, because Adam
turns a gradient of rounding noise into a full step of either sign. The samples are a
function of seed, step, prompt and sample, so that every way of cutting sees the same ones.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB
from runs import NO_EVALUATION, completions, tiny_overrides
from torch import Tensor

from recipes import grpo_full_finetune as module
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.data import ShuffledSampler
from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.training.mini_batches import MiniBatch
from torchtune_grpo.trajectory import Trajectory

CONFIG = "llama3_2_1B_lora_grpo"
GROUP = 4
BASE = f"""
dtype=fp32 optimizer=torch.optim.SGD optimizer.lr=1.0 ~optimizer.fused ~optimizer.weight_decay
lr_scheduler.num_warmup_steps=0 num_steps=1 ppo_epochs=2 batch_size=4 grpo_samples={GROUP}
forward_batch_size=null enable_activation_checkpointing=false loss.kl_coeff=0.1
loss.aggregation=dapo log_groups=99
""".split()
BASE += NO_EVALUATION
VARIANTS = {
    "rows two at a time": ["forward_batch_size=2"],
    "padded": ["pack_groups=false"],
    "rolled out in batches that cut groups": ["rollout.max_rows=3"],
    "rolled out row by row, groups one at a time": ["rollout.max_rows=1", "forward_batch_size=4"],
    "checkpointed": ["enable_activation_checkpointing=true"],
    "padded rows three at a time": ["forward_batch_size=3", "pack_groups=false"],
}


# The runs' configs name these rewards and losses.


def length(prompts, completions, **_):
    return [len(c) % 5 for c in completions]


def second_of_four(prompts, completions, **_):
    """Groups 1 and 3 are equal; nobody has the mean of groups 0 and 2."""
    return [7.0 * (row % 4 == 1) * (row // 4 % 2 == 0) for row, _ in enumerate(completions)]


def first_two_differ(prompts, completions, **_):
    return [(1.0, 3.0, 2.0, 2.0)[row % 4] for row, _ in enumerate(completions)]


class EveryRow(GRPOLoss):
    needs_all_rows = True


class Own(GRPOLoss):
    def __call__(self, **inputs):
        return super().__call__(**inputs)


EVERY_ROW, OWN = (f"loss._component_={__name__}.{loss.__name__}" for loss in (EveryRow, Own))


def reordered(sample_groups: Callable[..., Trajectory], order: tuple) -> Callable[..., Trajectory]:
    """Give it many stop tokens, so that lengths vary, and put each group in ``order``."""

    def wrapped(*args, tokenizer, **kwargs) -> Trajectory:
        tokenizer.stop_tokens = list(range(0, VOCAB, 8))
        rows = sample_groups(*args, tokenizer=tokenizer, **kwargs)
        index = [start + i for start in range(0, rows.num_rows, GROUP) for i in order]
        return rows.select(torch.tensor(index))

    return wrapped


@dataclass
class Outcome:
    """A run's adapters by name, and what passed through its optimizer steps."""

    before: dict[str, Tensor]
    logged: list[dict] = field(default_factory=list)  # completions.jsonl
    after: dict[str, Tensor] = field(default_factory=dict)
    batches: list[MiniBatch] = field(default_factory=list)
    received: list[Tensor | None] = field(default_factory=list)  # old log-probs
    returned: list[Tensor] = field(default_factory=list)  # log-probs

    @property
    def trajectory(self) -> Trajectory:
        """The first step's rows."""
        return self.batches[0].trajectory


def adapters(recipe) -> dict[str, Tensor]:
    return {
        name.replace("_checkpoint_wrapped_module.", ""): p.detach().clone()
        for name, p in recipe.model.named_parameters()
        if p.requires_grad
    }


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Run the recipe, once for the same arguments."""
    tmp_path = tmp_path_factory.mktemp("invariance")
    overrides = [*tiny_overrides(CONFIG, tmp_path), *BASE]

    @cache
    def run(*more, rows=(0, 1, 2, 3), prompts=(0, 1, 2, 3), reward="length") -> Outcome:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        cfg = load_config(CONFIG, [*overrides, *more, f"output_dir={folder}"])
        cfg.rewards = [{"_component_": f"{__name__}.{reward}"}]
        recipe = module.GRPOFullFinetuneRecipe(cfg)
        recipe.setup(cfg)
        outcome = Outcome(adapters(recipe))
        update, in_order = recipe.update, module.in_order

        def watched_order(*args):
            outcome.returned.append(in_order(*args))
            return outcome.returned[-1]

        def watched_update(batch, step):
            outcome.batches.append(batch)
            outcome.received.append(batch.old_logprobs)
            update(batch, step)

        recipe.update = watched_update
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "sample_groups", reordered(module.sample_groups, rows))
            patch.setattr(module, "in_order", watched_order)
            patch.setattr(ShuffledSampler, "next", lambda *_, skip: list(prompts))
            recipe.train()
        recipe.cleanup()
        outcome.after, outcome.logged = adapters(recipe), completions(folder)
        return outcome

    return run


def assert_same(result: Outcome, base: Outcome, *, atol: float = 1e-5) -> None:
    for name, value in base.after.items():
        torch.testing.assert_close(result.after[name], value, atol=atol, rtol=0, msg=name)


def assert_logged_alike(result: Outcome, base: Outcome) -> None:
    """Each row's texts, rewards and log-probs; the numbers are rounded in another order."""
    assert len(result.logged) == len(base.logged) == 16
    for row, expected in zip(result.logged, base.logged, strict=True):
        numbers = {key for key, value in expected.items() if isinstance(value, float)}
        assert {"advantage", "trainer_logprob", "sampler_logprob"} < numbers
        for key, value in expected.items():
            assert row[key] == (pytest.approx(value, abs=1e-5) if key in numbers else value), key


@pytest.mark.slow
def test_weights_do_not_depend_on_how_the_step_is_cut(train):
    base = train()
    assert len(base.trajectory.response_lengths.unique()) > 3
    assert base.trajectory.advantages.abs().max() > 0.5
    moved = max((base.after[n] - base.before[n]).abs().max().item() for n in base.before)
    assert moved > 1e-2
    cuts = {len(base.batches[0].micro_batches)}
    for name, change in VARIANTS.items():
        result = train(*change)
        cuts.add(len(result.batches[0].micro_batches))
        try:
            assert_same(result, base)
            assert_logged_alike(result, base)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    assert len(cuts) >= 4  # they really were cut differently


@pytest.mark.slow
def test_weights_do_not_depend_on_the_order_of_rows_or_prompts(train):
    """Other rows are side by side, other prompts in a batch; the sums are the same."""
    base = train()
    assert_same(train("forward_batch_size=2", rows=(2, 0, 3, 1)), base)
    assert_same(train("forward_batch_size=8", rows=(3, 1, 0, 2)), base)
    split = ["rollout.max_rows=8", "forward_batch_size=8"]
    assert_same(train(*split, prompts=(3, 1, 0, 2)), base)


@pytest.mark.parametrize(
    ("reward", "cut", "kept", "atol"),
    [
        ("second_of_four", ["forward_batch_size=4"], [0, 1, 2, 3, 8, 9, 10, 11], 0),
        ("second_of_four", [], [0, 1, 2, 3, 8, 9, 10, 11], 1e-6),
        ("first_two_differ", ["loss.aggregation=grpo"], [0, 1, 4, 5, 8, 9, 12, 13], 1e-6),
        ("first_two_differ", ["pack_groups=false"], [0, 1, 4, 5, 8, 9, 12, 13], 1e-6),
    ],
)
def test_rows_whose_advantage_is_0_need_no_pass(train, reward, cut, kept, atol):
    """Weights are the same without them, to the bit where the passes are cut the same."""
    change = [*cut, "loss.kl_coeff=0", "optimizer.lr=0.1"]
    every = train(*change, EVERY_ROW, reward=reward)
    assert every.trajectory.num_rows == 16
    result = train(*change, reward=reward)
    assert result.trajectory.num_rows == len(kept)
    assert torch.equal(result.trajectory.weights, every.trajectory.weights[kept])
    assert_same(result, every, atol=atol)
    assert max((result.after[n] - result.before[n]).abs().max() for n in result.before) > 1e-3


@pytest.mark.parametrize("change", ["loss.kl_coeff=0.1", "loss.entropy_coeff=0.1", OWN])
def test_rows_that_may_have_a_gradient_stay(train, change):
    assert train("loss.kl_coeff=0", change, reward="first_two_differ").trajectory.num_rows == 16


@pytest.mark.slow
def test_a_prompt_that_comes_twice_in_a_step_has_other_samples(train):
    """The first time has the samples that the prompt has alone."""
    twice = train(prompts=(3, 1, 3, 3)).trajectory
    groups = [twice.select(torch.arange(i, i + GROUP)).completion_ids for i in (0, 8, 12)]
    assert groups[0] != groups[1] != groups[2] != groups[0]
    once = train(prompts=(3, 1, 0, 2)).trajectory
    assert once.completion_ids[: 2 * GROUP] == twice.completion_ids[: 2 * GROUP]


def test_old_logprobs_are_those_of_the_first_epoch_or_the_samplers(train):
    """In float32 sampler and trainer agree, so that training to either gives the same weights."""
    base = train()
    sampled, mask = base.trajectory.sampler_logprobs, base.trajectory.response_mask
    first, second = base.received
    assert first is None and torch.equal(second, base.returned[0])
    assert (base.returned[1] - second)[mask].abs().max() > 1e-3  # the policy has moved
    torch.testing.assert_close(second[mask], sampled[mask], atol=1e-4, rtol=0)
    sampler = train("objective.sampling_correction=old_logprobs")
    for received in sampler.received:
        assert torch.equal(received, sampler.trajectory.sampler_logprobs)
    assert len(sampler.received) == 2
    assert_same(sampler, base, atol=1e-4)


def test_old_logprobs_are_without_dropout(train):
    """So are the samples. Step 2 is looked at, since adapters do nothing at first."""
    dropout = ["model.lora_dropout=0.5", "num_minibatches=2", "num_steps=2"]
    result = train(*dropout)
    dropped = []
    for batch, old, first in list(zip(result.batches, result.received, result.returned))[4:]:
        mask = batch.trajectory.response_mask
        sampled = batch.trajectory.sampler_logprobs
        torch.testing.assert_close(old[mask], sampled[mask], atol=1e-4, rtol=0)
        dropped.append((first - old)[mask].abs().max())
    assert len(dropped) == 4 and min(dropped) > 1e-2


@pytest.mark.slow
def test_an_epoch_in_several_optimizer_steps(train):
    """Each step has its own groups; in both epochs old log-probs are the sampling policy's."""
    base = train("num_minibatches=2")
    steps = [batch.trajectory.prompt_indices.unique().tolist() for batch in base.batches]
    assert steps == [[0, 2], [1, 3]] * 2
    nothing, second, *again = base.received
    first = base.returned[0]  # by the policy that sampled, which needs no pass for it
    assert nothing is None
    assert all(torch.equal(a, b) for a, b in zip((first, second), again, strict=True))
    whole = train()  # whose first step is by the policy that sampled, too
    for rows, old in zip(([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]), again):
        mask = whole.trajectory.response_mask[rows][:, : old.shape[1]]
        expected = whole.returned[0][rows][:, : old.shape[1]]
        torch.testing.assert_close(old[mask], expected[mask], atol=1e-5, rtol=0)
    moved = (base.returned[1] - second)[base.received[1] != 0].abs().max()
    assert moved > 1e-3  # before its first step on these groups, the policy had moved
    for change in (["forward_batch_size=2"], ["pack_groups=false"]):
        assert_same(train("num_minibatches=2", *change), base)
    by_rows = train("num_minibatches=2", "loss.aggregation=grpo")
    for batch in (*base.batches, *by_rows.batches):  # whose denominators are its own
        assert batch.trajectory.weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("aggregation", ["grpo", "dapo"])
def test_truncated_rows_count_among_the_rows_and_not_among_the_tokens(train, aggregation):
    """As in TRL: the rows' mean is over all rows, the tokens' mean over those trained on."""
    change = ["objective.mask_truncated_completions=true", f"loss.aggregation={aggregation}"]
    rows = train(*change).trajectory
    cut = rows.truncated
    assert 0 < cut.sum() < 16 and not rows.weights[cut].any()
    share = 1.0 if aggregation == "dapo" else 1 - cut.double().mean().item()
    assert rows.weights.sum().item() == pytest.approx(share)
