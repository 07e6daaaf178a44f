"""When a sharded model's gradients cross the wire: counted on the first of four ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2

from torchtune_grpo.config.keys import DistributedConfig
from torchtune_grpo.machine.parallel import set_gradient_sync, shard

LAYERS, PARTS = 2, 3
GROUPS = LAYERS + 1  # of parameters that are gathered and scattered together


@pytest.fixture
def four_ranks():
    """This process is the first of four; the others do not exist, and collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def sharded_model(*, replicas: int = 1, frozen: bool = False):
    model = llama3_2(
        vocab_size=16, num_layers=LAYERS, num_heads=2, num_kv_heads=2, embed_dim=8,
        max_seq_len=8, intermediate_dim=8,
    )  # fmt: skip
    if frozen:  # as with adapters, only a part of every layer is trained
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "q_proj" in name or "norm" in name
    shard(model, DistributedConfig(replicas=replicas), device=torch.device("cpu"))
    return model


def collectives(model, defer: str) -> list[tuple[int, int, bool]]:
    """For each part's backward pass: reduce-scatters, all-reduces, and whether gradients came."""
    counts = []
    for part in range(PARTS):
        set_gradient_sync(model, last=part == PARTS - 1, defer=defer)
        loss = model(torch.ones(1, 3, dtype=torch.long)).square().sum()
        with CommDebugMode() as mode:
            loss.backward()
        calls = {str(op): number for op, number in mode.get_comm_counts().items()}
        scatters = sum(n for op, n in calls.items() if "reduce_scatter" in op)
        sums = sum(n for op, n in calls.items() if "all_reduce" in op or "allreduce" in op)
        came = any(p.grad is not None for p in model.parameters())
        counts.append((scatters, sums, came))
    return counts


@pytest.mark.parametrize(
    ("defer", "frozen", "waits"),
    [
        ("never", True, False),
        ("auto", False, False),
        ("auto", True, True),
        ("always", False, True),
    ],
)
def test_gradients_are_scattered_with_each_part_or_with_the_last(four_ranks, defer, frozen, waits):
    got = collectives(sharded_model(frozen=frozen), defer)
    early = (0, 0, False) if waits else (GROUPS, 0, True)
    assert got == [early] * (PARTS - 1) + [(GROUPS, 0, True)]


@pytest.mark.parametrize("defer", ["never", "always"])
def test_copies_of_a_sharded_model_are_summed_with_the_last_part_alone(four_ranks, defer):
    got = collectives(sharded_model(replicas=2), defer)
    early = 0 if defer == "always" else GROUPS
    assert got == [(early, 0, False)] * (PARTS - 1) + [(GROUPS, GROUPS, True)]


def test_what_cannot_be_sharded_is_refused(four_ranks):
    model, cpu = model_of_nf4(), torch.device("cpu")
    with pytest.raises(
        ValueError, match="^distributed.sharding: layers.0.* in 1 blocks, .* 4 ranks"
    ):
        shard(model, DistributedConfig(), device=cpu)
    with pytest.raises(ValueError, match="^distributed.cpu_offload=True: device=cpu"):
        shard(model, DistributedConfig(cpu_offload=True), device=cpu)


def model_of_nf4():
    return lora_llama3_2(
        ["q_proj"], vocab_size=16, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=128,
        max_seq_len=8, intermediate_dim=128, lora_rank=2, lora_alpha=2.0, quantize_base=True,
    )  # fmt: skip
