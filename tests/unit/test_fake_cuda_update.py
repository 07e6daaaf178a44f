"""The update on CUDA: every tensor is there, and no micro-batch makes the host wait for the GPU.

Tensors are fake, so that this needs no GPU: two devices in one operation raise an error, and so
does all that would read a value.
"""

from dataclasses import replace

import pytest
import torch
from fake_cuda import CUDA, Operations, backward, fake_cuda, on_cuda
from policies import LORA, SHAPE
from torchtune import training
from torchtune.models.llama3 import lora_llama3
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from trajectories import make_groups

from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.monitor.metrics import StepMetrics
from torchtune_grpo.training import (
    MicroBatch,
    attend_in_segments,
    in_order,
    response_logprobs,
    trajectory_logprobs,
)
from torchtune_grpo.training.logprobs import importance_weights
from torchtune_grpo.training.mini_batches import micro_batches
from torchtune_grpo.training.optimizer import total_grad_norm
from torchtune_grpo.training.policy import AdapterReference
from torchtune_grpo.trajectory import Trajectory

PROMPTS, RESPONSES = [6, 9], [5, 3, 1, 7]
GROUP = 2
SHAPE = SHAPE | {"num_layers": 1}
LARGE = {"embed_dim": 256, "intermediate_dim": 256}  # as NF4's blocks want it
KINDS = {
    "full": lambda: llama3_2(**SHAPE),
    "lora": lambda: lora_llama3_2(**LORA, **SHAPE),
    "qlora": lambda: lora_llama3_2(**LORA, **SHAPE | LARGE, quantize_base=True),
    "dora": lambda: lora_llama3_2(**LORA, **SHAPE, use_dora=True),
    "lora_output": lambda: lora_llama3(**LORA, **SHAPE, apply_lora_to_output=True),
}


def policy(kind: str) -> torch.nn.Module:
    """As the recipe prepares it, in bf16 on fake CUDA."""
    with training.set_default_dtype(torch.bfloat16):
        model = KINDS[kind]()
    attend_in_segments(model)
    adapters = get_adapter_params(model)
    if adapters:
        set_trainable_params(model, adapters)
    with fake_cuda():
        model.to(CUDA)
    return model.train()


def rollout(*, rows: int) -> tuple[Trajectory, list[MicroBatch]]:
    """Of two groups, scored; the layouts are made of real lengths, and then moved to CUDA."""
    trajectory = make_groups(PROMPTS, RESPONSES)
    parts = micro_batches(trajectory, group_size=GROUP, pack=True, rows=rows)
    texts = [str(row) for row in range(len(RESPONSES))]
    trajectory = replace(
        trajectory,
        advantages=torch.zeros(len(RESPONSES)),
        weights=torch.zeros(trajectory.response_mask.shape),
        prompts=texts,
        completions=texts,
        columns={"gold": texts},
    )
    with fake_cuda():
        return on_cuda(trajectory), [on_cuda(part) for part in parts]


@pytest.mark.parametrize(
    "kind, rows", [*((kind, GROUP) for kind in KINDS), ("lora", 2 * GROUP), ("lora", 1)]
)
def test_a_step_waits_for_no_micro_batch(kind, rows):
    metrics = StepMetrics()
    loss_of = GRPOLoss(dual_clip=3.0, entropy_coeff=0.01 if kind == "full" else 0.0)
    model, (trajectory, parts) = policy(kind), rollout(rows=rows)
    with fake_cuda(), Operations() as count:
        if kind == "full":  # a frozen copy does it; fake tensors cannot be copied
            ref_logprobs = trajectory_logprobs(model, parts, temperature=0.9)
        else:
            ref_logprobs = AdapterReference(model).logprobs(parts, temperature=0.9)
        assert ref_logprobs.device == CUDA and ref_logprobs.shape == trajectory.response_mask.shape
        trajectory = replace(trajectory, ref_logprobs=ref_logprobs)
        loss, seen = torch.zeros((), device=CUDA), []
        for micro_batch in parts:
            part = trajectory.select(micro_batch.rows, numbers=micro_batch.numbers)
            logprobs, entropy = response_logprobs(
                model,
                micro_batch.layout,
                temperature=0.9,
                with_entropy=True,
                entropy_gradient=loss_of.needs_entropy_gradient,
            )
            output = loss_of(
                logprobs=logprobs,
                old_logprobs=None,
                ref_logprobs=part.ref_logprobs,
                advantages=part.advantages,
                weights=part.weights,
                response_mask=part.response_mask,
                entropy=entropy,
                corrections=importance_weights(
                    trainer_logprobs=logprobs,
                    behaviour_logprobs=part.behaviour_logprobs,
                    response_mask=part.response_mask,
                    mode="sequence_mask",
                    cap=2.0,
                ),
            )
            backward([output.loss], [torch.ones((), device=CUDA)])
            metrics.add_update(output, entropy=entropy, response_mask=part.response_mask)
            loss += output.loss.detach()
            seen.append(logprobs.detach())
        metrics.add_sampling_gap(trajectory, in_order(seen, parts))
        grad_norm = total_grad_norm(model.parameters())
        metrics.add_sum("loss", loss, 1.0)
        metrics.add_max("grad_norm", grad_norm)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, grad_norm)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.grad.device == CUDA for p in trained)
    # These wait, too, though fake tensors do not tell.
    assert count["aten.masked_scatter_backward.default"] == 0
    assert count["from the host"] == 0, count.counts
    if rows > 1:  # the reference's pass, and the policy's
        assert count["torch_attn._varlen_attn.default"] == 2 * len(parts)
        assert count["torch_attn._varlen_attn_backward.default"] == len(parts)
