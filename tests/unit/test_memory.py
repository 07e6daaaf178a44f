"""What fits a rank, and what the distributed recipe makes of it."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from policies import LORA, SHAPE
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtune.models.llama3 import lora_llama3
from torchtune.models.llama3_2 import llama3_2

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.keys import DistributedConfig
from torchtune_grpo.machine import device as memory
from torchtune_grpo.machine.parallel import shard
from torchtune_grpo.rollout import NativeEngine, RolloutConfig
from torchtune_grpo.training import policy
from torchtune_grpo.training.policy import should_shard

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
CPU = torch.device("cpu")


def settings(name: str, **changes):
    return read_config(OmegaConf.merge(OmegaConf.load(CONFIGS / f"{name}.yaml"), changes))


def test_weight_bytes_of_plain_and_quantized_models():
    plain = llama3_2(**SHAPE).bfloat16()
    assert memory.weight_bytes(plain) == 2 * sum(p.numel() for p in plain.parameters())
    shape = {**SHAPE, "embed_dim": 128, "intermediate_dim": 128, "num_kv_heads": 4}
    with torch.device("meta"):
        quantized = lora_llama3(**LORA, **shape, quantize_base=True)
    base = 2 * 7 * 128 * 128  # two layers of seven matrices
    rest = sum(p.numel() for p in quantized.parameters()) - base
    assert memory.weight_bytes(quantized) == base * 4.5 / 8 + rest * 4


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    monkeypatch.setattr(policy, "world_size", lambda: 2)


@pytest.mark.parametrize(("gigabytes", "sharded"), [(5.2, False), (4.8, True)])
def test_adapters_are_replicated_where_the_model_fits(monkeypatch, gigabytes, sharded):
    """Llama 3.2 1B and its adapters take 2.5 GB in bf16, twice of which has to be free."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(gigabytes * 1e9))
    assert should_shard(settings("llama3_2_1B_lora_grpo"), device=CPU) == sharded
    never = settings("llama3_2_1B_lora_grpo", distributed={"sharding": "never"})
    assert not should_shard(never, device=CPU)
    assert should_shard(settings("llama3_2_1B_full_grpo"), device=CPU)


def test_ranks_of_one_machine_share_its_memory(monkeypatch):
    alone = memory.free_bytes(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.free_bytes(CPU) == pytest.approx(alone / 4, rel=0.3)


@pytest.mark.parametrize(("free_here", "free_there", "by_layer"), [(1, 9, True), (9, 1, False)])
def test_what_is_gathered_has_to_fit_the_device_that_computes(
    monkeypatch, free_here, free_there, by_layer
):
    """With distributed.fsdp_cpu_offload the parameters are in the host's memory: there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model = llama3_2(**SHAPE)
        size = memory.weight_bytes(model)
        settings = RolloutConfig(cuda_graphs="never")
        engine = NativeEngine(model, settings, device=torch.device("cuda"))
        shard(model, DistributedConfig(), device=CPU)
        free = {"cuda": free_here * size, "cpu": free_there * size}
        monkeypatch.setattr(memory, "free_bytes", lambda device: free[device.type])
        assert engine._by_layer == by_layer
    finally:
        dist.destroy_process_group()


def test_one_rank_alone_shards_nothing(monkeypatch):
    monkeypatch.setattr(policy, "world_size", lambda: 1)
    always = settings("llama3_2_1B_full_grpo", distributed={"sharding": "always"})
    assert not should_shard(always, device=CPU)
