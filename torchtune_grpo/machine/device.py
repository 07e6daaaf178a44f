"""The machine under this process: device, memory, threads and random numbers."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import re
import sys
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Event, Thread

import numpy as np
import torch
from torch import nn
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import utils

from torchtune_grpo.machine.parallel import rank

_DRIVER = Path("/proc/driver/nvidia/version")
_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Of control groups of version 2 and 1: their folder, the files of limit and use, and what of
# memory.stat can be given up.
_MEMORY_OF_GROUPS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_NF4_BITS = 4.5  # bits of a weight, including its block's scales
# Below this many parameters a second thread gains next to nothing.
MANY_PARAMETERS = 1_000_000
_OPENMP_GRAIN = 2**15  # number of elements for which torch takes one more thread
_LOOK_SECONDS = 0.5
_BUSY_SHARE = 0.2  # share of one CPU that other processes take

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGEST_LIMIT = 32 * 2**20  # the highest M_MMAP_THRESHOLD that glibc accepts
_DEFAULT_PAD = 128 * 2**10
HEAP_BYTES = 448 * 2**20
_MOST_WEIGHTS = 2**30  # in bytes; with larger models, products take far longer than mapping memory
MAPPED_BYTES = 2**20


def find_device(name: str) -> torch.device:
    """Call torchtune's ``get_device``; ``cuda`` without a GPU is an error and not the CPU.

    Under torchrun, ``cuda`` is the GPU whose number is this rank's number on its machine.
    """
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        number = device.index or int(os.environ.get("LOCAL_RANK", 0))
        if count == 0:
            raise ValueError(
                f"device={name}: torch {torch.__version__} finds no GPU here.{_driver_remedy()} "
                "Set device=cpu for a small model, or install a torch for your GPU (pytorch.org)."
            )
        if number >= count:
            raise ValueError(
                f"device={name}: torch finds {count} GPUs, numbered from 0, and this rank needs "
                f"number {number}; give another number, or lower --nproc_per_node."
            )
        # cuDNN takes 0.05 to 1 s to plan each new shape, and each step has new ones.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Sums of a product that is split stay in float32, as the trainer's and sampler's agree.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        return utils.get_device(device=name)
    except RuntimeError as error:
        raise ValueError(f"device={name}: is not available here; give cpu or cuda.") from error


@cache
def multiplies_bf16(device: torch.device) -> bool:
    """Whether a device has instructions that multiply bf16, and need not emulate them."""
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):  # since torch 2.12 or so
        known = torch.cpu.get_capabilities()
        return bool(known.get("avx512_bf16") or known.get("amx_bf16"))
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return True


def _driver_remedy() -> str:
    """Say what to do if NVIDIA's driver is older than torch's CUDA needs; "" otherwise."""
    needed = {"12": 525, "13": 580}.get(str(torch.version.cuda).partition(".")[0])
    with suppress(OSError):
        driver = re.search(r"Kernel Module.*?\s(\d+)\.\d", _DRIVER.read_text())
        if driver and needed and int(driver[1]) < needed:
            return (
                f" NVIDIA's driver is {driver[1]}, and CUDA {torch.version.cuda} needs {needed}: "
                "update the driver, or `pip install --force-reinstall torch --index-url "
                "https://download.pytorch.org/whl/cu126`."
            )
    return ""


def seed_step(seed: int, step: int) -> None:
    """Seed Python's, numpy's and torch's generators for a step, on each rank differently.

    What dropout and rewards draw then depends on nothing that was drawn before the step, so that no
    generator's state has to be saved or restored.
    """
    own = int(np.random.SeedSequence((seed, step, rank())).generate_state(1)[0])
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)


@contextmanager
def only_warnings() -> Iterator[None]:
    """Silence torchtune's log, which is also ours, except for warnings."""
    log = utils.get_logger()
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def choose_threads(model: nn.Module) -> None:
    """Let torch use one CPU thread for a small model; let more spin only while CPUs are idle.

    The model may be on the meta device. ``OMP_NUM_THREADS``, which torchrun sets for several ranks,
    and ``MKL_NUM_THREADS`` override the number.
    """
    if "OMP_NUM_THREADS" not in os.environ and "MKL_NUM_THREADS" not in os.environ:
        if sum(parameter.numel() for parameter in model.parameters()) < MANY_PARAMETERS:
            torch.set_num_threads(1)
    if torch.get_num_threads() > 1 and sys.platform == "linux":
        _spin_only_alone()


@cache
def _spin_only_alone() -> None:
    """Make OpenMP's waiting threads sleep while other processes are busy.

    By default they spin, which is fastest on idle CPUs; but next to another busy process they take
    away the CPU that the last thread of an operation needs, and a step takes twice as long or more.
    The number of threads stays the same, as results depend on it.
    """
    Thread(target=_watch_others, args=(torch.get_num_threads(),), daemon=True).start()


def _watch_others(threads: int) -> None:
    cpus = os.sched_getaffinity(0)
    wake: Event | None = None  # ends the sleeping teams
    busy, own = _busy_seconds(cpus), time.process_time()
    while True:
        time.sleep(_LOOK_SECONDS)
        before = busy, own
        busy, own = _busy_seconds(cpus), time.process_time()
        others = busy - before[0] - (own - before[1])
        if wake is None and others > _BUSY_SHARE * _LOOK_SECONDS:
            wake = Event()
            for _ in range(-(-(len(cpus) + 1 - threads) // (threads - 1))):
                Thread(target=_sleeping_team, args=(threads, wake), daemon=True).start()
        elif wake is not None and others <= _BUSY_SHARE * _LOOK_SECONDS:
            wake.set()
            wake = None


def _sleeping_team(threads: int, wake: Event) -> None:
    """Add threads that do nothing: with more threads than CPUs, libgomp's hardly spin."""
    torch.zeros(threads * _OPENMP_GRAIN).add_(1)
    wake.wait()


def _busy_seconds(cpus: Container[int]) -> float:
    """Return the seconds of some CPUs that all processes have used; 0 if the system is silent."""
    ticks = 0
    with suppress(OSError, ValueError), open("/proc/stat") as file:
        for line in file:
            name, *counts = line.split()
            if name.startswith("cpu") and name != "cpu" and int(name[3:]) in cpus:
                ticks += sum(map(int, counts[:3]))  # user, nice, system
    return ticks / os.sysconf("SC_CLK_TCK")


def free_bytes(device: torch.device) -> int:
    """Return a CUDA device's free memory or, on a CPU, a rank's share of the available memory.

    What torch's allocator keeps for reuse counts as free. A system without /proc has no limit. A
    container's limit counts, whatever its host has.
    """
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    free = _left_by_limits()
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _left_by_limits() -> int:
    """Return what the limits of this process's control groups leave, such as a container's."""
    left = 1 << 60
    groups = _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else []
    for _, controller, path in (line.split(":", 2) for line in groups):
        if controller not in _MEMORY_OF_GROUPS:
            continue
        folder, most, used, cached = _MEMORY_OF_GROUPS[controller]
        own = Path(path.lstrip("/"))
        # A container may see its own group as the root, and yet be told its path on the host.
        for group in (own, *own.parents):
            with suppress(OSError, ValueError):  # there is no such file, or it says "max"
                at = _GROUPS / folder / group
                free = int((at / most).read_text()) - int((at / used).read_text())
                stat = dict(line.split() for line in (at / "memory.stat").read_text().splitlines())
                left = min(left, free + int(stat.get(cached, 0)))
    return left


def weight_bytes(model: nn.Module) -> int:
    """Return the size of a model's parameters, which may be on the meta device."""
    bits = (
        p.numel() * (_NF4_BITS if isinstance(p.data, NF4Tensor) else 8 * p.itemsize)
        for p in model.parameters()
    )
    return round(sum(bits) / 8)


def keep_freed_memory(weights: int = 0) -> None:
    """Give glibc a permanent heap: 448 MiB beside the bytes of ``weights`` that are loaded later.

    Outside it, each large tensor is mapped separately.

    By default glibc keeps returning freed memory to the system, and each decoded token maps and
    zeroes it again, page by page. A heap that only grows has another fault: in training,
    short-lived tensors lie between those that autograd keeps, and the holes that they leave are too
    small for torch's aligned memory, so that the heap becomes about twice as large as its contents.
    So tensors of 1 MiB and more do not make it grow (a lower limit costs page faults, a higher one
    leaves holes). Pages that were never written take no memory. Without glibc nothing happens.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        mallopt, malloc, free = libc.mallopt, libc.malloc, libc.free
    except (OSError, AttributeError):
        return
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free.argtypes = [ctypes.c_void_p]
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    # By which the next block makes the heap grow:
    mallopt(_M_TOP_PAD, HEAP_BYTES + min(weights, _MOST_WEIGHTS))
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_LIMIT)
    free(malloc(_LARGEST_LIMIT - 2**16))
    mallopt(_M_TOP_PAD, _DEFAULT_PAD)
    mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
