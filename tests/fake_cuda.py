"""Tensors of device ``cuda`` without a GPU: shapes, dtypes and devices, but no values.

Tensors of two devices in one operation raise ``FakeTensorDeviceMismatchError``. What waits for the
GPU (``.item()``, ``.tolist()``, ``bool()``, indexing with a mask) raises an error, too, since there
is no value to be had.
"""

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

CUDA = torch.device("cuda", 0)


_MODE = FakeTensorMode(allow_non_fake_inputs=True)  # one: tensors of two do not go together


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Make tensors on ``cuda`` fake, and all that is computed from them."""
    _let_autograd_know_cuda()
    with _MODE:
        yield


def on_cuda(value: Any) -> Any:
    """Move a dataclass of tensors, with all that it holds."""
    if isinstance(value, torch.Tensor):
        return value.to(CUDA)
    if not is_dataclass(value):
        return value
    return replace(value, **{f.name: on_cuda(getattr(value, f.name)) for f in fields(value)})


def _let_autograd_know_cuda() -> None:
    """Give autograd a guard for CUDA devices, without which a build for CPUs aborts.

    torch itself does this for a CUDA build without a GPU. The guard of meta tensors does nothing.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    guards[cuda] = guards[cuda] or guards[meta]


@torch.no_grad()
def backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Do what ``torch.autograd.backward`` does, whose engine asks for a real GPU's stream.

    It has no gradients of its own, for which some formulas are longer. Leaves get a ``grad``.
    Every node is called once, after all that hands it a gradient.
    """
    waits: Counter = Counter()  # by node: edges into it over which nothing has come yet
    roots = list(dict.fromkeys(y.grad_fn for y in outputs))
    seen, stack = set(roots), list(roots)
    while stack:
        for after, _ in stack.pop().next_functions:
            waits[after] += 1
            if after is not None and after not in seen:
                seen.add(after)
                stack.append(after)
    inbox: dict = {node: [None] * len(node._input_metadata) for node in seen}

    def hand(node, number, gradient):
        if gradient is not None:
            wanted = node._input_metadata[number]
            gradient = gradient.sum_to_size(wanted.shape).to(wanted.dtype)
            before = inbox[node][number]
            inbox[node][number] = gradient if before is None else before + gradient

    for y, gradient in zip(outputs, gradients, strict=True):
        hand(y.grad_fn, y.output_nr, gradient)
    ready = [node for node in roots if not waits[node]]
    while ready:
        node = ready.pop()
        received = inbox.pop(node)
        if hasattr(node, "variable"):
            leaf = node.variable
            leaf.grad = received[0] if leaf.grad is None else leaf.grad + received[0]
            continue
        if callable(node):
            given = node(*received)
        else:  # an autograd.Function: no None, and its numbers, behind its tensors, have no edge
            given = node.apply(*map(_or_zeros, received, node._input_metadata))
        given = given if isinstance(given, tuple) else (given,)
        for (after, number), gradient in zip(node.next_functions, given, strict=False):
            if after is not None:
                hand(after, number, gradient)
                waits[after] -= 1
                if not waits[after]:
                    ready.append(after)


def _or_zeros(gradient, wanted):
    if gradient is not None:
        return gradient
    return torch.zeros(wanted.shape, dtype=wanted.dtype, device=wanted.device)
