"""Optimizer steps: in float32 whatever the weights' dtype, at the scheduled rate, if finite.

Near a weight of 0.02, bf16 numbers are 1.2e-4 apart, so that every step of 1e-5 would be rounded
away. Weights in bf16 therefore either have float32 masters, which take the steps and are saved in
checkpoints, or are rounded at random, up or down with the probabilities that keep the mean (Zamirai
et al. 2020, arXiv:2010.06192), which takes no memory. With masters, gradients are also summed over
micro-batches in float32; otherwise in bf16.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao import optim
from torchtune import config, utils

from torchtune_grpo.config.check import instantiate
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.machine.parallel import gather_over_ranks, reduce_gradients

log = utils.get_logger("INFO")

MASTER = "master"  # in a parameter's state: its value in float32
_ROUNDED_STEPS = "rounded_steps"  # in the first group, if it rounds: number of steps with noise
# Optimizers by the bits of a moment, with its block's scale
_MOMENT_BITS = {
    8.125: (optim.Adam8bit, optim.AdamW8bit, optim.AdamFp8, optim.AdamWFp8),
    4.25: (optim.Adam4bit, optim.AdamW4bit),
}
MAX_IN_A_ROW = 3  # skipped optimizer steps that stop the run


class PolicyOptimizer:
    """The config's optimizer of a policy, its schedule, and the guard against NaN and infinity."""

    def __init__(self, cfg: GRPOConfig, policy: nn.Module) -> None:
        self.optimizer = make_optimizer(cfg.optimizer, policy.parameters())
        self.scheduler = make_lr_scheduler(cfg, self.optimizer)
        self.guard = NonFiniteGuard(policy)
        self._policy, self._max_norm = policy, cfg.clip_grad_norm

    def step(self, loss: Tensor, *, num_tokens: int, step: int) -> dict[str, Any]:
        """Sum the ranks' gradients, clip them, and take the step if they and the loss are finite.

        If no rank has a token to train on, the weights stay as they are. Returns metrics.
        """
        parameters = [*self._policy.parameters()]
        reduce_gradients(self._policy)
        norm = total_grad_norm(parameters)
        if num_tokens > 0 and self.guard.allows_step(loss, norm, step=step):
            if self._max_norm is not None:
                nn.utils.clip_grads_with_norm_(parameters, self._max_norm, norm)
            optimizer_step(self.optimizer)
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        return {"grad_norm": norm, "learning_rate": rate, "nonfinite_steps": self.guard.skipped}

    def bytes_to_come(self, device: torch.device) -> int:
        """Return the bytes of a device that steps will take: gradients, and states not yet made."""
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        parts = [_local(p) for p in trained if p.device.type == device.type]
        states = 0 if self.optimizer.state else later_bytes(self.optimizer, parts)
        return gradient_bytes(self.optimizer, parts) + states


def make_optimizer(node: DictConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the config's optimizer for the trained parameters; ``optimizer_step`` steps it.

    For weights in bf16, ``bf16_stochastic_round: true`` chooses random rounding instead of masters.
    torchao's own rounding does not work for sharded weights and differs between ranks.
    """
    # A user can do nothing about this warning, of the first step of torchao's 8-bit optimizers.
    warnings.filterwarnings("ignore", message=".*does not implement _stable_hash_for_caching")
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = config.instantiate(node, trained)
    is_sharded = any(isinstance(parameter, DTensor) for parameter in trained)
    if is_sharded and node.get("fused") and not isinstance(optimizer, torch.optim.Adam):
        raise ValueError(
            f"optimizer.fused=True: torch has no fused {type(optimizer).__name__} for sharded "
            "weights; set optimizer.fused=false."
        )
    if any(parameter.dtype == torch.bfloat16 for parameter in trained):
        if node.get("bf16_stochastic_round"):
            optimizer.param_groups[0][_ROUNDED_STEPS] = 0
        else:  # gradients are float32, too: the others are added to a first one that is
            for parameter in trained:
                parameter.grad_dtype = None  # any
                parameter.register_post_accumulate_grad_hook(_widen_gradient)
    return optimizer


def _widen_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.float()


def has_masters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps float32 copies of the weights that it trains."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    has_bf16 = any(p.dtype == torch.bfloat16 for p in parameters)
    return has_bf16 and _ROUNDED_STEPS not in optimizer.param_groups[0]


def training_bytes(node: DictConfig, parameters: Iterable[nn.Parameter]) -> int:
    """Estimate the bytes of gradients and optimizer, before there is one."""
    trained = [p for p in parameters if p.requires_grad]
    like = make_optimizer(node, [nn.Parameter(torch.zeros(1, dtype=trained[0].dtype))])
    return gradient_bytes(like, trained) + later_bytes(like, trained)


def gradient_bytes(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> int:
    """Return the bytes of the gradients of some parameters."""
    masters = has_masters(optimizer)
    return sum(p.numel() * (4 if masters else p.itemsize) for p in parameters)


def later_bytes(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> int:
    """Estimate the bytes of the optimizer's state for some parameters after its first step."""
    settings, masters = optimizer.defaults, has_masters(optimizer)
    moments = len(settings.get("betas", ())) or bool(settings.get("momentum"))
    bits = next(
        (bits for bits, kinds in _MOMENT_BITS.items() if isinstance(optimizer, kinds)), None
    )
    if getattr(getattr(optimizer, "args", None), "optim_bits", None) == 8:  # bitsandbytes
        bits = 8.125
    total = 0.0
    for p in parameters:
        size = 4 if masters else p.itemsize
        total += p.numel() * (4 * masters + moments * (size if bits is None else bits / 8))
    return round(total)


@torch.no_grad()
def optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Run ``optimizer.step()``, in float32 where weights are bf16."""
    first = optimizer.param_groups[0]
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if has_masters(optimizer):
        _step_on_copies(optimizer, trained)
    elif _ROUNDED_STEPS in first:
        # Seeded by the step's number: ranks round alike, and a resumed run repeats the noise.
        first[_ROUNDED_STEPS] += 1
        noise = torch.Generator(first["params"][0].device).manual_seed(first[_ROUNDED_STEPS])
        for parameter in trained:  # one at a time: the copies are large
            _step_on_copies(optimizer, [parameter], noise)
    else:
        optimizer.step()


def _step_on_copies(
    optimizer: torch.optim.Optimizer, parameters: list[Tensor], noise: torch.Generator | None = None
) -> None:
    """Step only some parameters, on float32 copies: masters or, with noise, temporary copies.

    An optimizer steps what its groups list, and finds a parameter's state under the parameter. For
    one step the copies stand in for the parameters in both. With P for the copy of p:

        groups    [p, q]            [P]             [p, q]
        state     {p: moments}  ->  {P: moments} -> {p: moments, and P if it is a master}
    """
    groups = [group["params"] for group in optimizer.param_groups]
    copies = {p: _float32_copy(optimizer, p) for p in parameters}
    for group, listed in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [copies[p] for p in listed if p in copies]
    optimizer.step()
    for group, listed in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = listed
    for p, stepped in copies.items():
        state = optimizer.state[p] = optimizer.state.pop(stepped, {})
        if noise is None:
            state[MASTER] = stepped.detach()
        elif p.dtype == torch.bfloat16:
            round_at_random(_local(stepped), noise)
        p.copy_(stepped)


def _float32_copy(optimizer: torch.optim.Optimizer, p: Tensor) -> nn.Parameter:
    """Return a parameter's master, or a new copy, with its gradient and the optimizer's state."""
    assert p.grad is not None
    state = optimizer.state.pop(p, {})
    copy = nn.Parameter(state.pop(MASTER, p).detach().float())
    copy.grad = p.grad.float()
    optimizer.state[copy] = state
    return copy


def round_at_random(values: Tensor, generator: torch.Generator) -> None:
    """Round contiguous, finite float32 numbers to one of their two neighbours in bf16, in place."""
    noise = torch.empty_like(values, dtype=torch.int32).random_(0, 2**16, generator=generator)
    values.view(torch.int32).add_(noise).bitwise_and_(-(2**16))


def make_lr_scheduler(cfg: GRPOConfig, optimizer: torch.optim.Optimizer) -> Any:
    """Build the config's ``lr_scheduler``, if it has one.

    torchtune's warm-up starts with a rate of 0, which would waste a rollout. That step is skipped,
    and the schedule is one step longer, so that it does not end at 0 either.
    """
    if cfg.lr_scheduler is None:
        return None
    # torch warns of this step, and of one with nothing to train on, where only the schedule moves.
    warnings.filterwarnings("ignore", message=r"Detected call of .lr_scheduler\.step")
    num_steps, make = cfg.num_steps * cfg.updates_per_step, partial(instantiate, "lr_scheduler")
    trial = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    make(cfg.lr_scheduler, trial, num_training_steps=num_steps)
    skipped = int(trial.param_groups[0]["lr"] == 0)
    scheduler = make(cfg.lr_scheduler, optimizer, num_training_steps=num_steps + skipped)
    if skipped:
        scheduler.step()
    return scheduler


class NonFiniteError(RuntimeError):
    """Weights, or losses or gradients of several optimizer steps in a row, are not finite."""

    says_all = True  # no traceback is shown


def total_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients, a scalar; infinite or NaN if any of them is."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class NonFiniteGuard:
    """Allows or skips each optimizer step, the same on all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._in_a_row = model, 0
        self.skipped = 0

    def state_dict(self) -> dict[str, int]:
        """Return the counts, so that a run that keeps failing also ends if it is restarted."""
        return {"skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue the counts of ``state_dict``."""
        self.skipped, self._in_a_row = state["skipped"], state["in_a_row"]

    def allows_step(self, loss: Tensor, grad_norm: Tensor, *, step: int) -> bool:
        """Whether loss and gradient norm are finite on all ranks.

        Raises a NonFiniteError the third time in a row.
        """
        # The one place in an optimizer step that waits for the GPU.
        finite = bool(loss.isfinite().all() & grad_norm.isfinite().all())
        if all(gather_over_ranks(finite)):
            self._in_a_row = 0
            return True
        self.skipped += 1
        self._in_a_row += 1
        message = (
            f"Step {step}: loss {loss.item()} and gradient norm {grad_norm.item()} are not both "
            f"finite{' on another rank' if finite else self._parameters()}; the optimizer step is "
            "skipped."
        )
        if self._in_a_row >= MAX_IN_A_ROW:
            raise NonFiniteError(
                f"{message} That is {self._in_a_row} in a row, and the run stops. A lower "
                "optimizer.lr or clip_grad_norm may help."
            )
        log.warning(message)
        return False

    def _parameters(self) -> str:
        """Name the parameters whose gradients are not finite, if any are."""
        gradients = [(name, p.grad) for name, p in self._model.named_parameters()]
        bad = [name for name, g in gradients if g is not None and not _local(g).isfinite().all()]
        return f" ({len(bad)} gradients, {bad[0]} for one)" if bad else ""


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
