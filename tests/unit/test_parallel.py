"""When a sharded model's gradients cross the wire: counted on the first of four ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2

from torchtune_grpo.config.keys import DistributedConfig
from torchtune_grpo.machine.parallel import shard

LAYERS = 2


@pytest.fixture
def four_ranks():
    """This process is the first of four; the others do not exist, and collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def sharded_model(*, frozen: bool = False):
    model = llama3_2(
        vocab_size=16, num_layers=LAYERS, num_heads=2, num_kv_heads=2, embed_dim=8,
        max_seq_len=8, intermediate_dim=8,
    )  # fmt: skip
    if frozen:  # as with adapters, only a part of every layer is trained
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "q_proj" in name or "norm" in name
    shard(model, DistributedConfig(), device=torch.device("cpu"))
    return model


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
