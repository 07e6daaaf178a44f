"""Optimizer steps that bf16 would round away, that are not finite, or whose rate would be 0."""

import math
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from processes import on_two_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtune.modules.peft import LoRALinear, get_adapter_params, set_trainable_params
from torchtune.training import set_default_dtype

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.machine.parallel import (
    broadcast_trained_parameters,
    gather_over_ranks,
    reduce_gradients,
    shard,
)
from torchtune_grpo.models.layers import PeftDoRALinear, standardize
from torchtune_grpo.training.optimizer import (
    NonFiniteError,
    NonFiniteGuard,
    PolicyOptimizer,
    make_lr_scheduler,
    make_optimizer,
    optimizer_step,
    round_at_random,
    total_grad_norm,
    training_bytes,
)

ADAMW = {"_component_": "torch.optim.AdamW", "lr": 1e-6, "weight_decay": 0.0}
ADAMW8 = ADAMW | {"_component_": "torchao.optim.AdamW8bit"}
ROUNDED = ADAMW8 | {"bf16_stochastic_round": True}


@pytest.fixture(autouse=True)
def eager():
    """torchao compiles its optimizers."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def trained(node: dict, *, steps: int, dtype=torch.bfloat16):
    """Weights, small and large ones, after some steps, and the optimizer."""
    draw = torch.Generator().manual_seed(0)
    begin = [0.02 * torch.randn(16, 256, generator=draw), torch.ones(64)]
    weights = [nn.Parameter(value.bfloat16().to(dtype)) for value in begin]
    optimizer = make_optimizer(OmegaConf.create(node), weights)
    for _ in range(steps):
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=draw) + 0.5
            weight.grad = gradient.bfloat16().to(dtype)
        optimizer_step(optimizer)
    return [weight.detach() for weight in weights], optimizer


@pytest.mark.parametrize("node", [ADAMW, ADAMW8], ids=["adamw", "adamw8bit"])
def test_masters_take_the_steps_of_float32_weights(node):
    exact, _ = trained(node, steps=9, dtype=torch.float32)
    weights, optimizer = trained(node, steps=9)
    entries = optimizer.state_dict()["state"].values()
    for weight, entry, want in zip(weights, entries, exact, strict=True):
        assert entry["master"].equal(want) and weight.equal(want.bfloat16())
    assert weights[0].dtype == torch.bfloat16 and len(entries) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["torch.optim.AdamW", "torch.optim.SGD", "torchao.optim.AdamW8bit"]
)
def test_what_steps_are_going_to_take_is_known(name, dtype):
    cfg = read_config(load_config("tiny_arithmetic_grpo", [f"optimizer={name}"]))
    model = nn.Linear(64, 256, dtype=dtype, bias=False)
    optimizer = PolicyOptimizer(cfg, model)
    to_come = optimizer.bytes_to_come(torch.device("cpu"))
    assert training_bytes(cfg.optimizer, model.parameters()) == to_come
    model(torch.ones(1, 64, dtype=dtype)).sum().backward()
    gradients = sum(p.grad.nbytes for p in model.parameters())
    optimizer_step(optimizer.optimizer)
    states = [value for entry in optimizer.optimizer.state.values() for value in entry.values()]
    sizes = [part.nbytes for value in states if value.dim() > 0 for part in parts_of(value)]
    assert to_come == gradients + sum(sizes)
    assert optimizer.bytes_to_come(torch.device("cpu")) == (gradients if states else to_come)
    assert optimizer.bytes_to_come(torch.device("cuda")) == 0


def parts_of(state: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensor with the numbers of torchao's 8-bit states, or the tensor itself."""
    return [state.codes, state.scale] if hasattr(state, "codes") else [state]


class OneLayer(nn.Module):
    """Whose gradient is 1 for each micro-batch of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


def test_a_group_of_one_rank_sends_nothing(tmp_path, monkeypatch):
    """As vLLM makes one, in a process that no other rank waits for."""
    for name in ("all_reduce", "all_gather_object", "broadcast"):
        monkeypatch.setattr(dist, name, Mock(side_effect=AssertionError(name)))
    model = OneLayer()
    model(torch.ones(1, 2).bfloat16()).sum().backward()
    (parameter,) = model.parameters()
    grad, place = parameter.grad.clone(), parameter.grad.data_ptr()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        reduce_gradients(model)
        broadcast_trained_parameters(model)
        assert gather_over_ranks(3) == [3]
    finally:
        dist.destroy_process_group()
    assert parameter.grad.equal(grad) and parameter.grad.data_ptr() == place


@pytest.mark.slow
@pytest.mark.parametrize("node, each", [(ADAMW, 300), (ROUNDED, 256)], ids=["masters", "rounded"])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_with_masters_gradients_are_summed_in_float32(tmp_path, sharded, node, each):
    """Over 300 micro-batches and two ranks; bf16 cannot count beyond 256."""

    def summed(rank: int) -> tuple[torch.dtype, list]:
        model = OneLayer()
        if sharded:
            shard(model, device=torch.device("cpu"))
        make_optimizer(OmegaConf.create(node), model.parameters())
        for _ in range(300 if sharded or rank == 0 else 0):  # the other has no row to train on
            model(torch.ones(1, 2).bfloat16()).sum().backward()
        reduce_gradients(model)
        (parameter,) = model.parameters()
        grad = parameter.grad.full_tensor() if sharded else parameter.grad
        return grad.dtype, grad.unique().tolist()

    dtype = torch.float32 if node is ADAMW else torch.bfloat16
    expected = (dtype, [each * (2.0 if sharded else 1.0)])
    assert on_two_ranks(summed, folder=tmp_path) == [expected, expected]


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "AdamW"])
def test_what_torch_cannot_fuse_for_sharded_weights_is_named(name):
    node = OmegaConf.create({"_component_": f"torch.optim.{name}", "lr": 0.1, "fused": True})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, src_data_rank=None))
        if name == "AdamW":
            weight.grad = torch.ones_like(weight)
            make_optimizer(node, [weight]).step()
            return
        with pytest.raises(ValueError, match=f"optimizer.fused=True: .* {name} .*fused=false"):
            make_optimizer(node, [weight])
    finally:
        dist.destroy_process_group()


def test_weights_in_float32_have_the_optimizer_of_the_config():
    _, optimizer = trained(ROUNDED, steps=1, dtype=torch.float32)
    assert "master" not in str(optimizer.state_dict()["state"][0].keys())
    assert "rounded" not in str(optimizer.param_groups)


def test_random_rounding_keeps_the_mean_and_takes_one_of_the_neighbours():
    below, above = torch.tensor([0.02, 0.02]).bfloat16().float()[0], 0.0201416015625
    values = (below + 0.3 * (above - below)).repeat(10**6)
    values[1::2] *= -1
    round_at_random(values, torch.Generator().manual_seed(0))
    assert values.abs().unique().tolist() == [below.item(), above]
    for half in (values[::2], values[1::2]):
        assert (half.abs() == above).double().mean().item() == pytest.approx(0.3, abs=2e-3)
    exact = torch.tensor([0.0, 1.0, -3.0, 2.0**-126]).repeat(100)
    rounded = exact.clone()
    round_at_random(rounded, torch.Generator().manual_seed(0))
    assert rounded.equal(exact)


def test_noise_is_the_same_on_all_ranks_and_new_in_each_step():
    """Or a weight would be rounded up always, or never. The global generator is left alone."""
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        weight = nn.Parameter(torch.full((4096,), 0.02).bfloat16())
        before = weight.detach().clone()
        optimizer = make_optimizer(OmegaConf.create({**ROUNDED, "lr": 3e-5}), [weight])
        moved = []
        for _ in range(2):
            weight.data.copy_(before)
            optimizer.state.clear()
            weight.grad = torch.ones_like(weight)
            optimizer_step(optimizer)
            moved.append(weight != before)
        assert torch.get_rng_state().equal(state)
        runs.append(torch.stack(moved))
    assert runs[0].equal(runs[1])
    first, second = runs[0]
    assert all(0.1 < share.double().mean() < 0.9 for share in (first, second, first != second))


@pytest.mark.parametrize("kind", [LoRALinear, PeftDoRALinear])
@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "nf4"])
def test_an_adapter_in_float32_is_the_same_function_and_takes_small_steps(kind, quantized):
    torch.manual_seed(0)
    with set_default_dtype(torch.bfloat16):
        layer = kind(256, 128, 4, 8.0, use_bias=True, quantize_base=quantized)
    model = nn.Sequential(layer)
    standardize(model)
    set_trainable_params(model, adapter := get_adapter_params(model))
    if hasattr(layer, "initialize_dora_magnitude"):
        layer.initialize_dora_magnitude()
    x = torch.randn(3, 5, 256).bfloat16().requires_grad_()
    layer.disabled = True
    base = layer(x)
    layer.disabled = False
    assert layer(x).equal(base)  # it adds nothing at first: the scale of DoRA is 1, not nearly
    nn.init.normal_(layer.lora_b.weight, std=0.05)
    if hasattr(layer, "magnitude"):
        layer.magnitude.data *= 1 + torch.rand(128)
    out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    exact = kind(256, 128, 4, 8.0, use_bias=True)
    exact.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
    wide = x.detach().float().requires_grad_()
    expected = exact(wide)
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.02)
    expected.square().sum().backward()
    for name, parameter in {"": x, **adapter}.items():
        assert parameter.grad.dtype == parameter.dtype == (torch.float32 if name else x.dtype)
        true = exact.get_parameter(name.removeprefix("0.")).grad if name else wide.grad
        assert 0 < true.norm() and (parameter.grad - true).norm() < 0.01 * true.norm(), name


def test_every_step_has_a_learning_rate_above_0():
    """Warm-up of 2 in 6 steps: 1/2, 2/2, then half a cosine of 5 steps, without its 0."""
    changes = ["num_steps=6", "lr_scheduler.num_warmup_steps=2"]
    cfg = read_config(load_config("tiny_arithmetic_grpo", changes))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_lr_scheduler(cfg, optimizer)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    cosine = [0.5 + 0.5 * math.cos(k * math.pi / 5) for k in range(5)]
    assert rates == pytest.approx([0.5, *cosine])


def decide(guard: NonFiniteGuard, *, loss: float = 0.5, grad: float = 1.0, step: int = 1) -> bool:
    weight = guard._model.weight
    weight.grad = torch.tensor([[0.0, grad]])
    return guard.allows_step(torch.tensor(loss), total_grad_norm([weight]), step=step)


def new_guard() -> NonFiniteGuard:
    return NonFiniteGuard(nn.Linear(2, 1, bias=False))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("what", ["loss", "grad"])
def test_a_step_that_is_not_finite_is_refused_and_said(what, bad, caplog):
    guard = new_guard()
    assert decide(guard) and not caplog.text
    assert not decide(guard, **{what: bad}, step=7) and guard.skipped == 1
    assert "Step 7: loss " in caplog.text and ("weight for one" in caplog.text) == (what == "grad")


def test_three_in_a_row_stop_the_run_also_across_a_restart():
    guard = new_guard()
    losses = (torch.nan, torch.nan, 1.0, torch.nan)
    assert [decide(guard, loss=loss) for loss in losses] == [False, False, True, False]
    assert not decide(guard, grad=torch.inf)
    resumed = new_guard()
    resumed.load_state_dict(guard.state_dict())
    with pytest.raises(NonFiniteError, match="3 in a row, and the run stops"):
        decide(resumed, grad=torch.inf)
    assert resumed.skipped == 5


def test_all_ranks_decide_alike(tmp_path):
    """Only rank 1 sees the NaN; if rank 0 stepped, their weights would differ from then on."""

    def decisions(rank: int) -> list[bool]:
        guard = new_guard()
        losses = [1.0, torch.nan if rank == 1 else 1.0, 1.0]
        return [decide(guard, loss=loss, step=step) for step, loss in enumerate(losses)]

    assert on_two_ranks(decisions, folder=tmp_path) == [[True, False, True]] * 2
