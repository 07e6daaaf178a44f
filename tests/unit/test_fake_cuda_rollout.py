"""A rollout on CUDA: prefill, decoding and greedy evaluation, with every tensor on the GPU.

Tensors are fake, so that this needs no GPU: two devices in one operation raise an error, and so
does all that would read a value. What does so on purpose, at the ends of rows, is left out.
"""

import pytest
import torch
from fake_cuda import CUDA, Operations, fake_cuda
from policies import LORA, SHAPE, VOCAB, build_policy
from torchtune import training
from torchtune.models.llama3 import lora_llama3

from torchtune_grpo.models import standardize
from torchtune_grpo.rollout import (
    NativeEngine,
    RolloutConfig,
    RolloutRequest,
    SamplingParams,
    row_keys,
)
from torchtune_grpo.rollout.batch import GroupRollout
from torchtune_grpo.rollout.cache import GroupCache
from torchtune_grpo.rollout.graphs import StepGraphs

KINDS = ("llama", "untied", "qwen", "lora", "dora", "lora_output", "qlora")
PARAMS = {
    "plain": {},
    "cool": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "filters": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalty": {"repetition_penalty": 1.5, "min_new_tokens": 5, "suppressed_tokens": (1, 2)},
}


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch):
    monkeypatch.setattr(GroupCache, "BLOCK", 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**10, 10**10))


def policy(kind: str) -> torch.nn.Module:
    """As the recipe prepares it, in bf16 on fake CUDA."""
    if kind == "qlora":
        with training.set_default_dtype(torch.bfloat16):
            shape = SHAPE | {"embed_dim": 256, "intermediate_dim": 256}
            model = lora_llama3(**LORA, **shape, quantize_base=True)
    else:
        model = build_policy(kind, torch.bfloat16)
    standardize(model)
    with fake_cuda():
        return model.to(CUDA)


@torch.no_grad()
def roll_out(kind: str, *, graphs: StepGraphs | None = None, merge: str = "auto", **params):
    """Two turns of rows, and steps between; returns the operations of the last step."""
    engine = NativeEngine(policy(kind), RolloutConfig(merge_adapters=merge), device=CUDA)
    prompts = [[1] * length for length in (5, 2, 9)]
    request = RolloutRequest(
        prompts=prompts,
        group_size=4,
        params=SamplingParams(**{"max_generated_tokens": 12, **params}),
        stop_tokens=[3, 4],
        keys=row_keys(seed=0, step=0, prompt_indices=range(3), group_size=4),
    )
    with fake_cuda(), engine.current_weights() as (decoder, cache):
        rollout = GroupRollout(decoder, cache, engine._buffers, request, max_rows=8, graphs=graphs)
        assert rollout.replace_ended()
        for _ in range(GroupCache.BLOCK + 1):  # the cache grows
            rollout.decode()
        rollout.live[:2] = rollout._next_rows(2)  # two rows have ended, and others come
        rollout.layout.update(rollout.live)
        rollout._start(rollout.live[:2])
        with Operations() as operations:
            rollout.decode()
        samples = rollout.transcript.samples(lengths=[4] * 12, truncated=[True] * 12)
    tensors = (*decoder.tensors(), *cache.tensors(), *engine._buffers.tensors())
    assert {x.device for x in tensors} == {samples.responses.device} == {CUDA}
    assert samples.sampler_logprobs.dtype == torch.float32
    return operations


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_has_all_on_the_gpu_and_a_step_does_not_wait(kind):
    operations = roll_out(kind)
    assert operations["aten.mm.dtype"] >= 1  # logits in float32, by the product itself


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_every_way_of_sampling_runs_on_the_gpu(params):
    roll_out("lora", **params)


@pytest.mark.parametrize("merge", ["always", "never"])
def test_merged_and_recorded_steps_run_on_the_gpu(merge):
    roll_out("lora", merge=merge)
    graphs = StepGraphs(lambda step: step)
    graphs.drop_unless_at = lambda tensors: None  # fake tensors have no addresses
    roll_out("lora", merge=merge, graphs=graphs)


def test_the_vocabulary_is_no_multiple_of_a_block():
    assert VOCAB % 128  # the tests above pad it
