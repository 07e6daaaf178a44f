"""Keeps a loss or gradient that is infinite or NaN away from the weights, and the evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.utils import get_logger

from torchtune_grpo.machine.parallel import gather_over_ranks, rank, world_size
from torchtune_grpo.trajectory import Trajectory

log = get_logger("INFO")

FOLDER = "nonfinite"
MAX_IN_A_ROW = 3  # so many skipped optimizer steps stop the run


class NonFiniteError(RuntimeError):
    """Weights, or losses or gradients of several optimizer steps in a row, are not finite."""


def total_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients that there are, a scalar; infinite or NaN if any of them is."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    # Gradients that are sharded over ranks (FSDP2) give a norm that is as well.
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


class NonFiniteGuard:
    """Decides about each optimizer step, alike on all ranks.

    Args:
        output_dir (Path): the batch goes to ``nonfinite/step_<n>.pt`` there, one file a rank.
    """

    def __init__(self, output_dir: Path) -> None:
        self._folder = output_dir / FOLDER
        self._in_a_row = 0
        self.skipped = 0

    def state_dict(self) -> dict[str, int]:
        """What a resumed run has to know, or one that fails and is restarted would never end."""
        return {"skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues the counts of :meth:`state_dict`."""
        self.skipped, self._in_a_row = state["skipped"], state["in_a_row"]

    def allows_step(
        self,
        *,
        loss: Tensor,
        grad_norm: Tensor,
        model: nn.Module,
        trajectory: Trajectory,
        step: int,
    ) -> bool:
        """Whether loss and gradient are finite on all ranks; if not, the batch is in a file.

        Args:
            loss (Tensor): the optimizer step's, a scalar.
            grad_norm (Tensor): of all gradients, a scalar.
            model (nn.Module): holds the gradients.
            trajectory (Trajectory): the N rows that gave them.
            step (int): the step's number, for the file's name.

        Raises:
            NonFiniteError: if this is the last straw.
        """
        # The one place of an optimizer step where a GPU has to be waited for: whether it is taken.
        finite = bool(loss.isfinite().all() & grad_norm.isfinite().all())
        if all(gather_over_ranks(finite)):
            self._in_a_row = 0
            return True
        self.skipped += 1
        self._in_a_row += 1
        path = self._write(loss, grad_norm, model, trajectory, step)
        message = (
            f"Step {step}: loss {loss.item()} and gradient norm {grad_norm.item()} are not both "
            f"finite{'' if not finite else ' on another rank'}; the optimizer step is skipped. The "
            f"batch is in {path}."
        )
        if self._in_a_row >= MAX_IN_A_ROW:
            raise NonFiniteError(
                f"{message} That is {self._in_a_row} in a row, and the run stops. Look at the "
                "batch's rewards and log-probs; a lower learning rate or clip_grad_norm may help."
            )
        log.warning(message)
        return False

    def _write(
        self, loss: Tensor, grad_norm: Tensor, model: nn.Module, trajectory: Trajectory, step: int
    ) -> Path:
        record: dict[str, Any] = {
            "step": step,
            "loss": loss.item(),
            "grad_norm": grad_norm.item(),
            "parameters": nonfinite_gradients(model),
            "prompts": [*map(str, trajectory.prompts)],
            "completions": trajectory.completions,
            "columns": trajectory.columns,
            **{name: tensor.detach().cpu() for name, tensor in trajectory.tensors().items()},
        }
        suffix = f"_rank_{rank()}" if world_size() > 1 else ""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{step:06d}_{self.skipped}{suffix}.pt"
        torch.save(record, path)
        return path


def nonfinite_gradients(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient holds an infinity or a NaN."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(_local(parameter.grad).isfinite().all())
    ]


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
