"""Models that cannot be sharded are refused with the key to change."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtune.models.llama3_2 import lora_llama3_2

from torchtune_grpo.config.keys import DistributedConfig
from torchtune_grpo.machine.parallel import shard


def test_what_cannot_be_sharded_is_refused():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    model = lora_llama3_2(
        ["q_proj"], vocab_size=16, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=128,
        max_seq_len=8, intermediate_dim=128, lora_rank=2, lora_alpha=2.0, quantize_base=True,
    )  # fmt: skip
    cpu = torch.device("cpu")
    try:
        with pytest.raises(ValueError, match="^distributed.sharding: layers.0.* in 1 blocks, .* 4"):
            shard(model, DistributedConfig(), device=cpu)
        with pytest.raises(ValueError, match="^distributed.cpu_offload=True: works with device"):
            shard(model, DistributedConfig(cpu_offload=True), device=cpu)
    finally:
        dist.destroy_process_group()
