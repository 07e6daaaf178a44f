"""Operations that a step launches on a GPU, counted without one, at the true shape of a model.

    python benchmarks/launches.py                         # Llama 3.2 1B in bf16
    python benchmarks/launches.py --ways lora --rows 256

Tensors are fake (torch's FakeTensorMode) and on the device `cuda`: only shapes and devices are
computed. Every operation that reaches torch's dispatcher, below autograd, is counted, unless it is
a view by its schema. What a CPU build of torch lacks is replaced, so that it takes the paths of a
CUDA build: the fused norm is one operation, and so are SiLU's backward and attention, flash without
a mask and memory-efficient with one. The count stands for launches but can differ:
`empty` launches nothing and counts; a sort, or a product that splits its sum, launches several
kernels and counts once.

    prefill     a step's prompts side by side, with each row's first token
    decode      one step of all rows, with the Triton kernel and without
    sampling    the part of the step from its logits to the transcript
    update      forward and backward of a micro-batch (one group) with activation checkpointing; its
                gradients are added to those of earlier micro-batches
    reference   log-probs of the same micro-batch

Ways are LoRA beside the weights, LoRA merged into a copy of them, and full fine-tuning. Prints one
JSON line; `copies_in` are copies from the host, each of which makes the host wait for the device.
"""

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import (
    GROUP,
    LLAMA_1B,
    PROMPT_LENGTHS,
    loss_of,
    random_policy,
    random_prompts,
    random_rows,
    report,
    request_of,
)
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import GraphExecGroup
from torchtune.modules import TransformerDecoder, TransformerSelfAttentionLayer
from torchtune.modules.peft import disable_adapter
from torchtune.training import set_activation_checkpointing

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from fake_cuda import CUDA, backward, fake_cuda, on_cuda  # noqa: E402

from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.rollout.batch import GroupRollout
from torchtune_grpo.rollout.cache import CacheSize, GroupCache
from torchtune_grpo.rollout.decoder import NativeDecoder
from torchtune_grpo.rollout.graphs import Buffers
from torchtune_grpo.training.logprobs import trajectory_logprobs
from torchtune_grpo.training.mini_batches import micro_batches
from torchtune_grpo.training.packing import MicroBatch
from torchtune_grpo.trajectory import Trajectory

WAYS = ("lora", "merged", "full")
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)  # of numbers, too


class Launches(TorchDispatchMode):
    """Dispatch mode that counts operations, except views, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.copies_in = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim" or func.is_view:
            return out
        self.names[str(func)] += 1
        if isinstance(out, Tensor) and out.device.type == "cuda":
            given = [x for x in args if isinstance(x, Tensor) and x.device.type == "cpu"]
            self.copies_in += any(x.dim() > 0 or func in _COPIES for x in given)
        return out

    @property
    def count(self) -> int:
        """Number of operations in all."""
        return self.names.total()


class _FusedAttention(TorchFunctionMode):
    """Attention as a CUDA build of torch launches it: as one kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = args
        mask, causal = kwargs.get("attn_mask"), kwargs.get("is_causal", False)
        if mask is None:
            return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)[0]
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(q, k, v, mask, needs_grad, is_causal=causal)[0]


@cache
def _fused_kernels() -> torch.library.Library:
    """Tell a CPU build of torch for what CUDA has one kernel; otherwise a norm is nine."""
    library = torch.library.Library("aten", "IMPL")
    if not torch.backends.cuda.is_built():
        for name in ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward"):
            library.impl(name, lambda *args: None, "CUDA")  # fake tensors never get there
    return library


@contextmanager
def counting_cuda() -> Iterator[None]:
    """Make tensors on the device ``cuda`` fake, and have them take the paths of a GPU."""
    _fused_kernels()
    with fake_cuda(), _FusedAttention():
        yield


def counted(work: Callable[[], Any]) -> Launches:
    """Return what some work launches."""
    with Launches() as launches:
        work()
    return launches


def build(kind: str, shape: dict[str, int]) -> TransformerDecoder:
    """Build the recipe's policy in bf16, on the meta device; kind is "lora" or "full"."""
    rank = 32 if kind == "lora" else None
    return random_policy(shape, rank=rank, dtype=torch.bfloat16, device="meta")


def decoding(model: TransformerDecoder, *, merge: bool, rows: int) -> dict[str, Launches]:
    """Count a rollout's prefill and a decoding step; only this function knows how to drive one."""
    decoder = NativeDecoder(model, merge_adapters=merge, dtype=torch.bfloat16, device=CUDA)
    for linear in decoder.linears():
        linear.refresh()
    lengths = [PROMPT_LENGTHS[i % 4] for i in range(rows // GROUP)]
    request = request_of(random_prompts(lengths, decoder.vocab), new_tokens=512)
    size, counts = CacheSize.of(request, max_rows=rows), {}
    for name, has_kernel in (("decode_without_kernel", False), ("decode", True)):
        cache, buffers = GroupCache(decoder.cache_shape), Buffers(CUDA)
        decoder.has_kernel = has_kernel
        rollout = GroupRollout(decoder, cache, buffers, request, size=size)
        counts["prefill"] = counted(rollout.replace_ended)
        rollout.decode()  # what a step does the first time only
        counts[name] = counted(rollout.decode)
    logits = torch.empty(rows, decoder.vocab, device=CUDA)
    at = rollout.layout

    def sample() -> None:
        rollout.transcript.sample(logits, numbers=at.numbers, last=at.last, slots=at.slots)
        at.advance()

    return counts | {"sampling": counted(sample)}


def training(
    model: TransformerDecoder, part: MicroBatch, rows: Trajectory, loss: GRPOLoss
) -> dict[str, Launches]:
    """Count the reference's and the policy's pass over one micro-batch."""
    with disable_adapter(model):
        reference = counted(lambda: trajectory_logprobs(model, [part], temperature=0.9))
    set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    model.train()

    def update() -> None:
        value = loss_of(model, part, rows, loss)
        with GraphExecGroup():  # a layer is recomputed once for all of its nodes
            backward([value], [torch.ones_like(value)])

    for parameter in model.parameters():  # the gradients of earlier micro-batches
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    return {"update": counted(update), "reference": reference}


def count(way: str, *, rows: int, shape: dict[str, int] = LLAMA_1B) -> dict[str, Launches]:
    """Return all counts of one way: "lora" beside the weights, "merged" or "full"."""
    model, loss = build("full" if way == "full" else "lora", shape), GRPOLoss(kl_coeff=0.04)
    batch = random_rows(vocab=shape["vocab_size"], prompt=292, shortest=32, longest=512)
    (part,) = micro_batches(batch, group_size=GROUP, pack=True, rows=GROUP)
    with counting_cuda():
        model.to_empty(device=CUDA)
        with torch.no_grad():
            counts = decoding(model, merge=way == "merged", rows=rows)
        if way != "merged":
            counts |= training(model, on_cuda(part), on_cuda(batch), loss)
    return counts


def main() -> None:
    """Count all ways and print one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32, help="of a decoding step")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # on norms in float32, and on fake tensors without an address
    result: dict[str, Any] = {}
    for way in args.ways:
        counts = count(way, rows=args.rows)
        result[way] = {name: launches.count for name, launches in counts.items()}
        result[way] |= {f"{name}_copies_in": n.copies_in for name, n in counts.items()}
    report("launches", args, **result)


if __name__ == "__main__":
    main()
