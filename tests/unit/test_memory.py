"""What fits a rank, and what the distributed recipe makes of it."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from policies import LORA, SHAPE
from torchtune.models.llama3 import lora_llama3
from torchtune.models.llama3_2 import llama3_2

from torchtune_grpo import memory, policy
from torchtune_grpo.policy import should_shard
from torchtune_grpo.read_config import read_config

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


@pytest.mark.parametrize("most", [1, 2, 7, 64])
@pytest.mark.parametrize("slope", [1, 3, 1000])
def test_most_that_fits(most, slope):
    """The largest number within the budget, by trying each; one thing if none fits."""
    for budget in range(0, 70 * slope, max(1, slope // 2)):
        cost = [5 + slope * -(-number // 4) for number in range(most + 1)]  # in steps of four
        fitting = [number for number in range(1, most + 1) if cost[number] <= budget]
        found = memory.most_that_fits(cost.__getitem__, most=most, budget=budget)
        assert found == max(fitting, default=1)


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
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(8e9))
    assert not should_shard(settings("llama3_2_1B_lora_grpo"), device=CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert should_shard(settings("llama3_2_1B_lora_grpo"), device=CPU)


def test_one_rank_alone_shards_nothing(monkeypatch):
    monkeypatch.setattr(policy, "world_size", lambda: 1)
    always = settings("llama3_2_1B_full_grpo", distributed={"sharding": "always"})
    assert not should_shard(always, device=CPU)
