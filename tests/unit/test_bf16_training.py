"""Steps that bf16 would round away: float32 adapters, float32 masters, random rounding."""

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torchtune.modules.peft import DoRALinear, LoRALinear, get_adapter_params
from torchtune.training import set_default_dtype
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

from torchtune_grpo.checkpoint import optimizer_state, restore_optimizer
from torchtune_grpo.machine.parallel import random_states, restore_random_state
from torchtune_grpo.models import PlainBiasDoRALinear, widen_adapters
from torchtune_grpo.training.optimizer import make_optimizer, optimizer_step, round_at_random

ADAMW = {"_component_": "torch.optim.AdamW", "lr": 1e-6, "weight_decay": 0.0}
ADAMW8 = ADAMW | {"_component_": "torchao.optim.AdamW8bit"}
ROUNDED = {"bf16_stochastic_round": True}


@pytest.fixture(autouse=True)
def eager():
    """torchao compiles its optimizers."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def trained(node: dict, *, steps: int, dtype=torch.bfloat16, resumed=None, done: int = 0):
    """Weights, small and large ones, after some steps of the same gradients, and the optimizer."""
    draw = torch.Generator().manual_seed(0)
    begin = [0.02 * torch.randn(16, 256, generator=draw), torch.ones(64)]
    weights = [nn.Parameter(value.bfloat16().to(dtype)) for value in begin]
    optimizer = make_optimizer(OmegaConf.create(node), weights)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 1, 100)
    if resumed is not None:
        before, state = resumed
        for weight, value in zip(weights, before, strict=True):
            weight.data.copy_(value)
        restore_optimizer(optimizer, scheduler, state, steps=done)
    for step in range(done, steps):
        noise = torch.Generator().manual_seed(step + 1)
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=noise) + 0.5
            weight.grad = gradient.bfloat16().to(dtype)
        optimizer_step(optimizer)
        scheduler.step()
        optimizer.zero_grad()
    return [weight.detach().clone() for weight in weights], optimizer


@pytest.mark.parametrize("node", [ADAMW, ADAMW8], ids=["adamw", "adamw8bit"])
def test_masters_take_the_steps_of_float32_weights(node):
    exact, _ = trained(node, steps=9, dtype=torch.float32)
    weights, optimizer = trained(node, steps=9)
    entries = optimizer.state_dict()["state"].values()
    for weight, entry, want in zip(weights, entries, exact, strict=True):
        assert entry["master"].equal(want) and weight.equal(want.bfloat16())
    assert weights[0].dtype == torch.bfloat16 and len(entries) == 2


def test_weights_in_float32_have_the_optimizer_of_the_config():
    _, optimizer = trained(ADAMW8 | ROUNDED, steps=1, dtype=torch.float32)
    assert "master" not in str(optimizer.state_dict()["state"][0].keys())
    assert "rounded" not in str(optimizer.param_groups)


@pytest.mark.parametrize(
    "node", [ADAMW, ADAMW8, ADAMW8 | ROUNDED], ids=["masters", "8bit", "rounded"]
)
def test_a_resumed_optimizer_continues_to_the_last_bit(node):
    whole, _ = trained(node, steps=8)
    half, optimizer = trained(node, steps=5)
    again, _ = trained(node, steps=8, resumed=(half, optimizer_state(optimizer)), done=5)
    for value, want, early in zip(again, whole, half, strict=True):
        assert value.equal(want)
        assert not value.equal(early) or value[0].max() == 1  # scales have no neighbour in reach
    exact = trained(node, steps=8, resumed=(half, {"state": {}, **groups_of(optimizer)}), done=5)
    assert not exact[0][0].equal(whole[0])  # without the states it would not


def groups_of(optimizer: torch.optim.Optimizer) -> dict:
    return {"param_groups": optimizer.state_dict()["param_groups"]}


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


def test_ranks_round_alike_and_leave_the_global_generator_alone():
    torch.manual_seed(1)
    one, _ = trained(ADAMW8 | ROUNDED, steps=3)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    other, _ = trained(ADAMW8 | ROUNDED, steps=3)
    assert all(a.equal(b) for a, b in zip(one, other, strict=True))
    assert torch.get_rng_state().equal(state)


def test_noise_is_new_in_each_step():
    """Or a weight would be rounded up always, or never."""
    weight = nn.Parameter(torch.full((4096,), 0.02).bfloat16())
    before = weight.detach().clone()
    optimizer = make_optimizer(OmegaConf.create({**ADAMW8, **ROUNDED, "lr": 3e-5}), [weight])
    moved = []
    for _ in range(2):
        weight.data.copy_(before)
        optimizer.state.clear()
        weight.grad = torch.ones_like(weight)
        optimizer_step(optimizer)
        moved.append(weight != before)
    assert all(0.1 < share.double().mean() < 0.9 for share in moved)
    assert 0.1 < (moved[0] != moved[1]).double().mean()


@pytest.mark.parametrize("kind", [LoRALinear, DoRALinear, PlainBiasDoRALinear])
@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "nf4"])
def test_an_adapter_in_float32_is_the_same_function_and_takes_small_steps(kind, quantized):
    torch.manual_seed(0)
    with set_default_dtype(torch.bfloat16):
        layer = kind(256, 128, 4, 8.0, use_bias=True, quantize_base=quantized)
    model = nn.Sequential(layer)
    widen_adapters(model)
    if hasattr(layer, "initialize_dora_magnitude"):
        layer.initialize_dora_magnitude()
    x = torch.randn(5, 256).bfloat16()
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
    for parameter in get_adapter_params(model).values():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all() and parameter.grad.any()
    exact = kind(256, 128, 4, 8.0, use_bias=True)
    state = {name: value.to(torch.float32) for name, value in layer.state_dict().items()}
    exact.load_state_dict(state)
    torch.testing.assert_close(out.float(), exact(x.float()), atol=0.05, rtol=0.02)


class Device:
    """What torch asks of a device's module, with a generator of the CPU's."""

    generator = torch.Generator()

    def get_rng_state(self, device):
        return self.generator.get_state()

    def set_rng_state(self, state, device):
        self.generator.set_state(state)


def test_the_devices_generator_is_saved_and_restored(monkeypatch):
    """Dropout on a GPU draws from it; here a device that torch is told of stands for one."""
    device, module = torch.device("privateuseone"), Device()
    monkeypatch.setattr(torch, "privateuseone", module, raising=False)
    states = random_states(device)
    drawn = torch.rand(3), torch.rand(3, generator=module.generator)
    restore_random_state(states, torch.device("cpu"))
    assert torch.rand(3).equal(drawn[0])
    assert not torch.rand(3, generator=module.generator).equal(drawn[1])
    restore_random_state(states, device)
    assert torch.rand(3, generator=module.generator).equal(drawn[1])
    restore_random_state(random_states(torch.device("cpu")), device)  # a run that began elsewhere
