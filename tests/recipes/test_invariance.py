"""Weights after optimizer steps do not depend on how the work is cut, to 1e-5 in float32.

The recipe's own class runs in this process, from config to saved checkpoint. With SGD, because Adam
turns a gradient of rounding noise into a full step of either sign. The samples are a
function of seed, step, prompt and sample, so that every way of cutting sees the same ones.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB
from omegaconf import OmegaConf
from runs import RECIPE, tiny_overrides

from torchtune_grpo.trajectory import Trajectory

ROOT = Path(__file__).parents[2] / "recipes"
CONFIG = "llama3_2_1B_lora_grpo"
GROUP = 4
BASE = [
    "dtype=fp32",
    "optimizer._component_=torch.optim.SGD",
    "optimizer.lr=1.0",
    "lr_scheduler.num_warmup_steps=0",
    "num_steps=1",
    "ppo_epochs=2",
    "batch_size=4",
    f"grpo_samples={GROUP}",
    "gradient_accumulation_steps=1",
    "forward_batch_size=null",
    "enable_activation_checkpointing=false",
    "loss.kl_coeff=0.1",
    "loss.aggregation=dapo",
]
VARIANTS = {
    "groups one at a time": ["forward_batch_size=4"],
    "rows two at a time": ["forward_batch_size=2"],
    "padded": ["pack_groups=false"],
    "padded, four at a time": ["pack_groups=false", "forward_batch_size=4"],
    "accumulated": ["batch_size=2", "gradient_accumulation_steps=2"],
    "accumulated one by one": ["batch_size=1", "gradient_accumulation_steps=4"],
    "checkpointed": ["enable_activation_checkpointing=true"],
    "token budget": ["forward_token_budget=64"],
    "token budget of one prompt": ["forward_token_budget=45"],
    "padded token budget": ["forward_token_budget=110", "pack_groups=false"],
}


def load_recipe_module():
    spec = importlib.util.spec_from_file_location("recipe", ROOT / f"{RECIPE}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reordered(roll_out: Callable[..., Trajectory], order: list[int]) -> Callable[..., Trajectory]:
    """``roll_out`` with the rows of each group in ``order``."""

    def wrapped(*args, **kwargs) -> Trajectory:
        rows = roll_out(*args, **kwargs)
        index = [start + i for start in range(0, rows.num_rows, GROUP) for i in order]
        return replace(
            rows.select(torch.tensor(index)),
            prompts=rows.prompts,
            completions=[rows.completions[i] for i in index],
            columns=rows.columns,
        )

    return wrapped


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Runs the recipe; returns its adapters' weights before and after, and its trajectories."""
    (tmp_path / "my_rewards.py").write_text(
        "def length(prompts, completions, **_):\n    return [len(c) % 5 for c in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    overrides = tiny_overrides(CONFIG, tmp_path)
    runs = 0

    def run(more: list[str], *, rows=(0, 1, 2, 3), prompts=(0, 1, 2, 3)):
        nonlocal runs
        runs += 1
        cfg = OmegaConf.load(ROOT / "configs" / f"{CONFIG}.yaml")
        changes = [*overrides, *BASE, *more, f"output_dir={tmp_path / str(runs)}"]
        cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist(changes))
        del cfg.optimizer.fused, cfg.optimizer.weight_decay
        cfg.eval_dataset, cfg.eval_every_n_steps = None, None
        cfg.rewards = [{"_component_": "my_rewards.length"}]
        module = load_recipe_module()
        module.roll_out = reordered(module.roll_out, list(rows))
        recipe = module.GRPOFullFinetuneRecipeSingleDevice(cfg)
        recipe.setup(cfg)
        recipe._tokenizer.stop_tokens = list(range(0, VOCAB, 8))  # so that lengths vary
        recipe._step_rows = lambda dataset, step: list(prompts)
        seen = []
        generate = recipe.generate_trajectory
        recipe.generate_trajectory = lambda *args: seen.append(generate(*args)) or seen[-1]
        trained = {n: p for n, p in recipe._model.named_parameters() if p.requires_grad}
        before = {name: p.detach().clone() for name, p in trained.items()}
        recipe.train()
        recipe.cleanup()
        name = lambda n: n.replace("_checkpoint_wrapped_module.", "")  # noqa: E731
        after = {name(n): p.detach() for n, p in trained.items()}
        return {name(n): p for n, p in before.items()}, after, *seen[0]

    return run


def assert_same(result, base) -> None:
    for name, value in base[1].items():
        torch.testing.assert_close(result[1][name], value, atol=1e-5, rtol=0, msg=name)


def test_weights_do_not_depend_on_how_the_step_is_cut(train):
    base = train([])
    lengths = base[2].response_lengths
    assert len(lengths.unique()) > 3 and base[2].advantages.abs().max() > 0.5
    moved = max((base[1][n] - base[0][n]).abs().max().item() for n in base[0])
    assert moved > 1e-2
    cuts = {len(base[3])}
    for name, change in VARIANTS.items():
        result = train(change)
        cuts.add(len(result[3]))
        try:
            assert_same(result, base)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    assert len(cuts) >= 5  # they really were cut differently


def test_weights_do_not_depend_on_the_order_of_rows_or_prompts(train):
    """Other rows side by side, other prompts in a batch, and the same sums."""
    base = train([])
    assert_same(train(["forward_batch_size=2"], rows=(2, 0, 3, 1)), base)
    assert_same(train(["forward_token_budget=64"], rows=(3, 1, 0, 2)), base)
    split = ["batch_size=2", "gradient_accumulation_steps=2", "forward_batch_size=8"]
    assert_same(train(split, prompts=(3, 1, 0, 2)), base)


def test_old_logprobs_are_those_of_the_first_epoch_or_the_samplers(train):
    """In float32 sampler and trainer agree, so that training to either gives the same weights."""
    base = train([])
    known = base[2]
    mask = known.response_mask
    torch.testing.assert_close(
        known.old_logprobs[mask], known.sampler_logprobs[mask], atol=1e-4, rtol=0
    )
    sampler = train(["old_logprobs=sampler"])
    assert torch.equal(sampler[2].old_logprobs, sampler[2].sampler_logprobs)
    for name, value in base[1].items():
        torch.testing.assert_close(sampler[1][name], value, atol=1e-4, rtol=0, msg=name)
    with pytest.raises(ValueError, match="sampling_correction=token_mask to null"):
        train(["old_logprobs=sampler", "sampling_correction=token_mask"])


def test_a_budget_that_a_row_can_exceed_is_refused(train):
    with pytest.raises(ValueError, match=r"forward_token_budget=30: .* give at least \d+"):
        train(["forward_token_budget=30"])
    with pytest.raises(ValueError, match="forward_token_budget=99: replaces forward_batch_size=4"):
        train(["forward_token_budget=99", "forward_batch_size=4"])
