"""Rollout and update on CUDA: every tensor is there, and no step makes the host wait for the GPU.

Where no GPU is needed, tensors are fake: two devices in one operation raise an error, and so does
all that would read a value. What reads values on purpose, at the ends of rows and to decide whether
a step is taken, is left out.
"""

from dataclasses import replace
from itertools import accumulate, pairwise
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from fake_cuda import CUDA, backward, fake_cuda, on_cuda
from launches import LLAMA_1B, Launches, count, counted, counting_cuda
from policies import KINDS, LORA, SHAPE, VOCAB, build_policy, full_logprobs, randomize
from rollouts import request
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.models.llama3_2 import lora_llama3_2
from torchtune.modules.peft import LoRALinear, get_adapter_params, set_trainable_params
from trajectories import make_groups

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import RolloutConfig
from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.machine import parallel, segments
from torchtune_grpo.machine.segments import (
    Segments,
    float32_product,
    has_varlen_kernel,
    varlen_attention,
)
from torchtune_grpo.monitor.metrics import StepMetrics
from torchtune_grpo.recipes.grpo_full_finetune import GRPOFullFinetuneRecipe
from torchtune_grpo.rollout.batch import GroupRollout
from torchtune_grpo.rollout.cache import CacheSize, GroupCache
from torchtune_grpo.rollout.graphs import StepGraphs
from torchtune_grpo.rollout.linear import RolloutLinear
from torchtune_grpo.rollout.native import NativeEngine
from torchtune_grpo.rollout.request import EngineContext
from torchtune_grpo.training.logprobs import trajectory_logprobs
from torchtune_grpo.training.mini_batches import MiniBatch, micro_batches
from torchtune_grpo.training.optimizer import PolicyOptimizer
from torchtune_grpo.training.reference import Reference

GROUP = 2


def policy(kind: str) -> torch.nn.Module:
    """As the recipe prepares it, in bf16 on fake CUDA."""
    model = build_policy(kind, torch.bfloat16)
    if adapters := get_adapter_params(model):
        set_trainable_params(model, adapters)
    with fake_cuda():
        return model.to(CUDA)


def scored_rows(*, rows: int) -> MiniBatch:
    """Of two groups; the layouts are made of real lengths, and then moved to CUDA."""
    trajectory = make_groups([6, 9], [5, 3, 1, 7])
    parts = micro_batches(trajectory, group_size=GROUP, pack=True, rows=rows)
    weights = torch.zeros(trajectory.response_mask.shape)
    trajectory = replace(trajectory, advantages=torch.zeros(4), weights=weights)
    with fake_cuda():
        return MiniBatch(on_cuda(trajectory), [on_cuda(part) for part in parts], num_tokens=16)


ROWS = [(kind, GROUP) for kind in (*KINDS, "qlora")]
ROWS += [("lora", 2 * GROUP), ("lora", 1), ("window", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("kind, rows", ROWS)
def test_an_update_waits_for_no_micro_batch(kind, rows, monkeypatch):
    model, batch = policy(kind), scored_rows(rows=rows)
    adapted = bool(get_adapter_params(model))
    changes = ["objective.sampling_correction=sequence_mask"]
    cfg = read_config(load_config("tiny_arithmetic_grpo", changes))
    recipe = GRPOFullFinetuneRecipe(cfg, Mock(cfg=cfg, device=CUDA))
    recipe.steps = Mock(done=0)
    loss = GRPOLoss(dual_clip=3.0, entropy_coeff=0.0 if adapted else 0.01)
    recipe.cfg, recipe.model, optimizer = cfg, model, PolicyOptimizer(cfg, model)
    recipe.parts = Mock(cfg=cfg, policy=model, loss=loss, optimizer=optimizer)
    monkeypatch.setattr(optimizer.guard, "allows_step", lambda *_, **__: True)
    monkeypatch.setattr(
        torch.Tensor, "backward", lambda loss: backward([loss], [torch.ones_like(loss)])
    )
    with fake_cuda(), Launches() as launches:
        if adapted:
            ref_logprobs = Reference(model).logprobs(batch.micro_batches, temperature=0.9)
        else:  # a frozen copy does it; fake tensors cannot be copied
            ref_logprobs = trajectory_logprobs(model, batch.micro_batches, temperature=0.9)
        assert ref_logprobs.device == CUDA
        batch.trajectory = replace(batch.trajectory, ref_logprobs=ref_logprobs)
        recipe.update(batch, StepMetrics())
    assert batch.old_logprobs.device == CUDA
    # These wait, too, though fake tensors do not tell.
    done = launches.names
    assert done["aten.masked_scatter_backward.default"] == launches.copies_in == 0, done
    # Logits are in float32 by the product itself; those of an adapted head are not.
    assert (done["aten.mm.dtype_out"] > 0) == (kind != "lora_output")
    trained = {p for p in model.parameters() if p.requires_grad}
    assert trained and trained == optimizer.optimizer.state.keys()  # each had a gradient
    if rows > 1:  # the reference's pass, and the policy's, of both layers
        assert done["torch_attn._varlen_attn.default"] == 2 * 2 * len(batch.micro_batches)
        assert done["torch_attn._varlen_attn_backward.default"] == 2 * len(batch.micro_batches)


def test_nf4_weights_come_to_the_gpu_before_fsdp_moves_them(monkeypatch):
    """FSDP2 itself swaps in parameters that require a gradient, which cannot be divided."""
    model = build_policy("qlora", torch.bfloat16)
    set_trainable_params(model, adapters := get_adapter_params(model))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    monkeypatch.setattr(parallel, "init_device_mesh", lambda *_: mesh)
    monkeypatch.setattr(_fully_shard, "_get_device_from_mesh", lambda _: CUDA)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **options: None)  # fake tensors have none
    try:
        with fake_cuda():
            parallel.shard(model, device=CUDA)
    finally:
        dist.destroy_process_group()
    shards = {name: parameter.to_local() for name, parameter in model.named_parameters()}
    assert {shard.device for shard in shards.values()} == {CUDA}
    assert sum(isinstance(shard, NF4Tensor) for shard in shards.values()) == 2 * 7
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(adapters)


PARAMS = {
    "greedy": {"temperature": 0.0},
    "filters": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalty": {"repetition_penalty": 1.5, "min_new_tokens": 5},
}


@torch.no_grad()
def sample_groups(kind: str, *, graphs: StepGraphs | None = None, merge: str = "auto", **params):
    """Two turns of rows, and steps between; returns the operations of the last step."""
    engine = NativeEngine(EngineContext(policy(kind), RolloutConfig(), CUDA), merge_adapters=merge)
    prompts = [[1] * length for length in (5, 2, 9)]
    asked = request(prompts, group_size=4, stops=[3, 4], **params)
    with fake_cuda(), engine.current_weights() as (decoder, cache):
        size = CacheSize.of(asked, max_rows=8)
        rollout = GroupRollout(decoder, cache, engine._buffers, asked, size=size, graphs=graphs)
        assert rollout.replace_ended()
        for _ in range(GroupCache.BLOCK + 1):  # the cache grows
            rollout.decode()
        ended = [row.slot for row in rollout.live[:2]]  # others come
        rollout._free_slots, rollout._remove_ended = ended, lambda: rollout.live[:2]
        del rollout.live[:2]
        assert rollout.replace_ended()
        launches = counted(rollout.decode)
        samples = rollout.transcript.samples(rollout._rows)
    tensors = (*decoder.tensors(), *cache.tensors(), *engine._buffers.tensors())
    assert {x.device for x in tensors} == {samples.responses.device} == {CUDA}
    assert samples.sampler_logprobs.dtype == torch.float32
    return launches.names


@pytest.fixture
def small_gpu(monkeypatch):
    monkeypatch.setattr(GroupCache, "BLOCK", 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**10, 10**10))


@pytest.mark.parametrize("kind", [*KINDS, "qlora"])
def test_a_rollout_has_all_on_the_gpu_and_a_step_does_not_wait(kind, small_gpu):
    operations = sample_groups(kind)
    assert operations["aten.mm.dtype"] > 0


@pytest.mark.parametrize("rank", [1, 4])
def test_rows_of_a_product_begin_at_16_bytes(rank):
    """As flash attention needs of the prefill's queries, which come from such a product."""
    modules = [LoRALinear(32, size, rank=rank, alpha=2).bfloat16() for size in (32, 16, 16)]
    with fake_cuda(), torch.no_grad():
        linear = RolloutLinear([m.to(CUDA) for m in modules], merge=False, dtype=torch.bfloat16)
        linear.refresh()
        rows = linear(torch.empty(5, 32, dtype=torch.bfloat16, device=CUDA))
    assert rows.shape == (5, 64) and rows.stride(0) * rows.itemsize % 16 == 0


def test_a_run_on_the_cpu_leaves_gpus_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", Mock(side_effect=AssertionError))
    metrics = StepMetrics()
    with metrics.timer("time/update"):
        pass
    assert metrics.finish()["time/update"] >= 0


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_every_way_of_sampling_runs_on_the_gpu(params, small_gpu):
    assert VOCAB % 128  # no multiple of a block of the search
    sample_groups("lora", **params)


@pytest.mark.parametrize("merge", ["always", "never"])
def test_merged_and_recorded_steps_run_on_the_gpu(merge, small_gpu):
    sample_groups("lora", merge=merge)
    graphs = StepGraphs(lambda step: step)
    graphs.drop_unless_at = lambda tensors: None  # fake tensors have no addresses
    sample_groups("lora", merge=merge, graphs=graphs)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lora", "full"])
def test_the_kernel_saves_launches_and_nothing_is_copied_in_between(way: str):
    with counting_cuda():
        assert counted(lambda: torch.tensor([1, 2], device="cuda")).copies_in == 1
    one, two = (count(way, rows=32, shape=LLAMA_1B | {"num_layers": n}) for n in (1, 2))
    a_layer = {name: two[name].count - one[name].count for name in two}
    assert 0 < a_layer["decode"] < a_layer["decode_without_kernel"]
    assert a_layer["sampling"] == 0 < a_layer["reference"] < a_layer["update"]
    names = ("decode", "decode_without_kernel", "sampling", "update", "reference")
    assert not any(two[name].copies_in for name in names)


def tree(prompt: int, *responses: int) -> list[list[range]]:
    """The segments of a prompt and of responses of so many tokens."""
    ends = pairwise(accumulate(responses, initial=prompt))
    return [[range(prompt)], *([range(prompt), range(*pair)] for pair in ends)]


@pytest.mark.parametrize("dtype, dropout", [(torch.float32, 0.0), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize(
    "window, shapes",
    [(None, [(3, 8), (4, 9)]), (3, [(5, 5), (3, 5), (4, 6)]), (5, [(3, 7), (4, 8)])],
)
def test_on_cuda_masks_are_aligned_where_the_kernel_does_not_run(
    dtype, dropout, window, shapes, monkeypatch
):
    parts = tree(5, 3, 0, 1, 4)
    stock, masks = F.scaled_dot_product_attention, []

    def attend(*args, attn_mask, **options):
        masks.append(attn_mask)
        return stock(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(segments, "_SCORES", 1)  # each part is a large one
    with fake_cuda():
        inputs = [torch.empty(13, heads, 16, dtype=dtype, device=CUDA) for heads in (4, 2, 2)]
        there = Segments.from_ranges(parts, device=CUDA)
        varlen_attention(*inputs, there, window=window, dropout=dropout)
    masks = [mask for mask in masks if mask is not None]
    assert [tuple(mask.shape) for mask in masks] == sorted(shapes)
    for mask in masks:
        assert mask.storage_offset() == 0
        assert mask.stride(-1) == 1 and mask.stride(0) % 8 == 0


@pytest.mark.parametrize("window, before", [(None, -1), (4, 3)])
def test_flash_attention_counts_the_tokens_before_a_query(window, before, monkeypatch):
    asked = []

    def varlen_attn(q, *others, window_size):
        asked.append(window_size)
        return q

    monkeypatch.setattr(segments, "_varlen_attn", lambda: (varlen_attn, False))
    with fake_cuda():
        q, k, v = (torch.empty(13, 4, 16, dtype=torch.bfloat16, device=CUDA) for _ in range(3))
        parts = Segments.from_ranges(tree(5, 3, 5), device=CUDA)
        varlen_attention(q, k, v, parts, window=window)
    assert asked == [(before, 0)]


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("rank", [pytest.param(rank, marks=GPU) for rank in (1, 4)])
@torch.no_grad()
def test_lora_of_any_rank_samples_what_the_model_says(rank):
    model = lora_llama3_2(**LORA | {"lora_rank": rank}, **SHAPE | {"embed_dim": 256})
    model = randomize(model).to("cuda", torch.bfloat16)
    engine = NativeEngine(EngineContext(model, RolloutConfig(), torch.device("cuda")))
    samples = engine.generate(request([[1, 2, 3], [4] * 9], group_size=4, stops=()))
    for row, prompt in enumerate([[1, 2, 3]] * 4 + [[4] * 9] * 4):
        tokens = torch.tensor(prompt + samples.responses[row].tolist(), device="cuda")
        expected = full_logprobs(model, tokens, 1.0)[0, len(prompt) - 1 :]
        got = samples.sampler_logprobs[row].to(expected)
        torch.testing.assert_close(got, expected, atol=0.1, rtol=0)


@pytest.mark.parametrize(
    "device, atol, rtol", [("cpu", 1e-4, 1e-5), pytest.param("cuda", 1e-3, 1e-5, marks=GPU)]
)
@pytest.mark.parametrize("into", [False, True])
def test_float32_product_is_not_rounded_to_bf16(device, atol, rtol, into):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 256, generator=generator).bfloat16() for n in (24, 1000))
    out = torch.empty(24, 1000, device=device) if into else None
    product = float32_product(x.to(device), weight.to(device), out=out)
    assert product.dtype == torch.float32
    assert out is None or product.data_ptr() == out.data_ptr()
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(product.cpu().double(), exact, atol=atol, rtol=rtol)


@pytest.mark.parametrize("kv_heads", [pytest.param(n, marks=GPU) for n in (8, 2, 1)])
@pytest.mark.parametrize("window", [None, 40, 1])
def test_varlen_attention_is_its_twin_forward_and_backward(kv_heads, window):
    """A prompt, and responses to it: of one token, of none, and of lengths that no tile has."""
    parts = tree(37, 5, 1, 0, 130, 64)
    *inputs, probe = [
        torch.randn(237, heads, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for seed, heads in enumerate((8, kv_heads, kv_heads, 8))
    ]
    results = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        given = [x.to(device, dtype).requires_grad_() for x in inputs]
        assert has_varlen_kernel(given[0]) == (device == "cuda")
        there = Segments.from_ranges(parts, device=torch.device(device))
        out = varlen_attention(*given, there, window=window)
        gradients = torch.autograd.grad(out, given, probe.to(device, dtype))
        results[device] = [x.float().cpu() for x in (out, *gradients)]
    # bf16 has 8 bits: a relative error of 0.4% in each factor of sums of about unit variance.
    torch.testing.assert_close(results["cuda"], results["cpu"], atol=0.04, rtol=0.04)
