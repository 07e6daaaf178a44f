"""The optimizer's steps in float32, whatever the dtype of the weights.

Beside a weight of 0.02, bf16 has no number closer than 6e-5; a step of 1e-6 is rounded away, each
time anew. So weights in bf16 either have float32 masters, which take the steps and are saved in
checkpoints, or are rounded at random, up or down with the probability that keeps the mean (Zamirai
et al. 2020, arXiv:2010.06192), which takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtune import config, utils

from torchtune_grpo.machine.quiet import no_advice

log = utils.get_logger("INFO")

MASTER = "master"  # of a parameter's state: its value in float32
_STEPS = "rounded_steps"  # of the first group: how many have drawn noise


def make_optimizer(node: DictConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The config's optimizer; if it trains weights in bf16, its steps are made in float32.

    torchao's ``bf16_stochastic_round: true`` chooses random rounding instead of masters. The noise
    is a function of the step's number, so that ranks round alike and a resumed run goes on exactly;
    and it works for sharded weights, which torchao's own does not.

    Args:
        node (DictConfig): the config's node ``optimizer``.
        parameters (Iterable[nn.Parameter]): of the model; those without gradients are left out.
    """
    no_advice()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = config.instantiate(node, trained)
    narrow = sum(p.numel() for p in trained if p.dtype == torch.bfloat16)
    if narrow:
        kind: Any = _Rounding if node.get("bf16_stochastic_round") else _Masters
        optimizer.__class__ = type(type(optimizer).__name__, (kind, type(optimizer)), {})
        if kind is _Masters:
            utils.log_rank_zero(
                log,
                f"{narrow:,} weights in bf16 have float32 masters, {4e-9 * narrow:.1f} GB; "
                "torchao.optim.AdamW8bit with optimizer.bf16_stochastic_round=True needs none.",
            )
    return optimizer


def has_masters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it keeps a float32 copy of what it trains."""
    return isinstance(optimizer, _Masters) and not isinstance(optimizer, _Rounding)


class _Masters:
    """Mixed with an optimizer's class: weights in bf16 step as float32 copies, their masters.

    Outside of a step, the optimizer's state and groups are those of the parameters.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]

    @torch.no_grad()
    def step(self) -> None:
        """The optimizer's step."""
        groups = [group["params"] for group in self.param_groups]
        trained = [p for group in groups for p in group if p.grad is not None]
        for part in self._parts(trained):
            wide = {p: self._widen(p) for p in part}
            try:
                for group, own in zip(self.param_groups, groups, strict=True):
                    group["params"] = [wide[p] for p in own if p in wide]
                super().step()  # type: ignore[misc]
            finally:
                for group, own in zip(self.param_groups, groups, strict=True):
                    group["params"] = own
            for p, stepped in wide.items():
                self.state[p] = self.state.pop(stepped, {})
                self._narrow(p, stepped)

    def _parts(self, trained: list[Tensor]) -> list[list[Tensor]]:
        return [trained]

    def _widen(self, p: Tensor) -> nn.Parameter:
        """A float32 stand-in for a parameter, with its gradient and state."""
        state = self.state.pop(p, {})
        master = state.pop(MASTER, None)
        stand_in = nn.Parameter(p.detach().float() if master is None else master)
        assert p.grad is not None
        stand_in.grad = p.grad.float()
        self.state[stand_in] = state
        return stand_in

    def _narrow(self, p: Tensor, stepped: Tensor) -> None:
        self.state[p][MASTER] = stepped.detach()
        p.copy_(stepped)


class _Rounding(_Masters):
    """The same, but rounded at random: the copies are made anew, one at a time."""

    @torch.no_grad()
    def step(self) -> None:
        """The optimizer's step."""
        group = self.param_groups[0]
        group[_STEPS] = group.get(_STEPS, 0) + 1
        noise = torch.Generator(group["params"][0].device)
        self._noise = noise.manual_seed(group[_STEPS])
        super().step()

    def _parts(self, trained: list[Tensor]) -> list[list[Tensor]]:
        return [[p] for p in trained]

    def _narrow(self, p: Tensor, stepped: Tensor) -> None:
        if p.dtype == torch.bfloat16:
            local = stepped.to_local() if isinstance(stepped, DTensor) else stepped
            round_at_random(local, self._noise)
        p.copy_(stepped)


def round_at_random(values: Tensor, generator: torch.Generator) -> None:
    """Rounds float32 numbers to one of their two neighbours in bf16, in place.

    Args:
        values (Tensor): contiguous; finite.
        generator (torch.Generator): of the same device.
    """
    noise = torch.empty_like(values, dtype=torch.int32).random_(0, 2**16, generator=generator)
    values.view(torch.int32).add_(noise).bitwise_and_(-(2**16))
