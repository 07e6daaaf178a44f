"""A rank's memory, threads and random states, and what it makes of them."""

import os
import platform
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from policies import build_policy
from runs import run
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.machine import device
from torchtune_grpo.machine.parallel import shard
from torchtune_grpo.run import Run
from torchtune_grpo.training import policy

CPU = torch.device("cpu")


@pytest.fixture
def two_threads(monkeypatch):
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    yield monkeypatch
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "variable, parameters, threads",
    [
        (None, device.MANY_PARAMETERS - 1, 1),
        (None, device.MANY_PARAMETERS, 2),
        ("OMP_NUM_THREADS", 1, 2),
        ("MKL_NUM_THREADS", 1, 2),
    ],
)
def test_a_tiny_model_gets_one_thread_unless_the_user_has_chosen(
    two_threads, variable, parameters, threads
):
    if variable:
        two_threads.setenv(variable, "2")
    device.choose_threads(nn.Linear(parameters, 1, bias=False, device="meta"))
    assert torch.get_num_threads() == threads


def test_an_old_driver_is_named_with_the_remedy(tmp_path, monkeypatch):
    """Of the open kernel module, too; a driver that is new enough is not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device, "_DRIVER", tmp_path / "version")
    names = "x86_64 Kernel Module  570.86.15", "Open Kernel Module for x86_64  570.86.15"
    for name, is_old in (*((name, True) for name in names), ("Kernel Module  580.1", False)):
        (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX {name}  Release Build\n")
        with pytest.raises(ValueError, match="finds no GPU here. ") as error:
            device.find_device("cuda")
        assert ("driver is 570, and CUDA 13.0 needs 580" in str(error.value)) == is_old
        assert ("`pip install --force-reinstall torch" in str(error.value)) == is_old


def test_a_run_on_cuda_sums_bf16_products_in_float32_and_does_without_cudnn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(device.utils, "get_device", lambda device: torch.device(device))
    settings = torch.backends.cuda.matmul
    settings.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.enable_cudnn_sdp(True)
    device.find_device("cuda")
    assert settings.allow_bf16_reduced_precision_reduction is False
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # it makes a plan for each shape


@pytest.mark.slow
def test_waiting_threads_sleep_beside_a_busy_process():
    """While nothing is computed; libgomp's own spinning takes half a second of the CPU here."""
    work = """
import subprocess, sys, time, torch
from torchtune_grpo.machine.device import choose_threads
choose_threads(torch.nn.Linear(1000, 1000, bias=False, device="meta"))
x = torch.zeros(2**20)
x.add_(1)
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
time.sleep(0.5)
before = time.process_time()
for _ in range(50):
    x.add_(1)
    time.sleep(0.02)
print(torch.get_num_threads(), time.process_time() - before)
other.kill()
"""
    others = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment = others | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", work]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    threads, seconds = done.stdout.split()
    assert threads == "2" and float(seconds) < 0.1, done.stderr


# In a process of its own: glibc's settings cannot be undone.
COUNT = """
import ctypes
from torchtune_grpo.machine.device import HEAP_BYTES, MAPPED_BYTES, keep_freed_memory

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype = ctypes.c_void_p
libc.mallinfo2.restype = Info
libc.free.argtypes = [ctypes.c_void_p]
def show():
    info = libc.mallinfo2()
    print(info.arena, info.hblkhd)

keep_freed_memory(WEIGHTS)
weights = libc.malloc(WEIGHTS)
show()
fit = [libc.malloc(MAPPED_BYTES) for _ in range(HEAP_BYTES // MAPPED_BYTES - 1)]
show()
more = [libc.malloc(MAPPED_BYTES) for _ in range(200)]
show()
for block in fit + more:
    libc.free(block)
show()
"""


@pytest.mark.parametrize("weights", [0, 300 * 2**20])
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc for its own figures")
def test_the_heap_stays_and_large_blocks_beyond_it_are_returned(tmp_path, weights):
    """Beside the weights, which lie in it."""
    (tmp_path / "count.py").write_text(COUNT.replace("WEIGHTS", str(weights)))
    lines = run("count.py", cwd=tmp_path).out.splitlines()
    arena, mapped = zip(*(map(int, line.split()) for line in lines), strict=True)
    assert arena[0] >= 448 * 2**20 + weights
    assert set(arena) == {arena[0]}  # neither grown nor given back
    assert mapped[1] == mapped[0]  # what fits is not mapped
    assert mapped[2] - mapped[1] >= 100 * 2**19  # some of the 200 fit into the room that was left
    assert mapped[3] == mapped[0]


def test_ranks_of_one_machine_share_its_memory(monkeypatch):
    alone = device.free_bytes(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert device.free_bytes(CPU) == pytest.approx(alone / 4, rel=0.3)


LIMITED = {
    "its own": ("0::/", {"": ("6000000", 5_000_000, 2_000_000)}, 3_000_000),
    "none": ("0::/app", {"": ("max", 5, 0), "app": ("max", 5, 0)}, None),
    "that of a group above": (
        "0::/pod/app",
        {"pod": ("6000000", 4_000_000, 0), "pod/app": ("9000000", 1_000_000, 0)},
        2_000_000,
    ),
    "of version 1, by the host's path": (
        "5:devices:/\n4:memory:/docker/0a1b\n0::/",
        {"memory": ("6000000", 5_000_000, 1_000_000)},
        2_000_000,
    ),
    "of version 1, none": ("4:memory:/", {"memory": (f"{2**63 - 4096}", 5, 0)}, None),
}


@pytest.mark.parametrize(("own", "groups", "left"), LIMITED.values(), ids=LIMITED)
def test_limits_of_control_groups_count(tmp_path, monkeypatch, own, groups, left):
    """What was read from files, and not lately, can be given up."""
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(device, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(device, "_GROUPS", tmp_path)
    names = {
        False: ("memory.max", "memory.current", "inactive_file"),
        True: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for group, (most, used, cached) in groups.items():
        limit, usage, inactive = names[group == "memory"]
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / limit).write_text(f"{most}\n")
        (tmp_path / group / usage).write_text(f"{used}\n")
        (tmp_path / group / "memory.stat").write_text(f"anon 1\n{inactive} {cached}\n")
    free = device.free_bytes(CPU)
    assert free == left if left is not None else free > 50_000_000


@pytest.mark.parametrize(("gigabytes", "sharded"), [(5.2, False), (4.8, True)])
def test_adapters_are_replicated_where_the_model_fits(monkeypatch, gigabytes, sharded):
    """Llama 3.2 1B and its adapters take 2.5 GB in bf16, twice of which has to be free."""
    monkeypatch.setattr(policy, "free_bytes", lambda device: int(gigabytes * 1e9))

    def shards(name: str, sharding: str = "auto") -> bool:
        cfg = load_config(name)
        cfg.distributed = {"sharding": sharding}
        return policy.should_shard(read_config(cfg), device=CPU)

    assert not shards("llama3_2_1B_full_grpo", "always")  # one rank alone
    monkeypatch.setattr(policy, "world_size", lambda: 2)
    assert shards("llama3_2_1B_lora_grpo") == sharded
    assert not shards("llama3_2_1B_lora_grpo", "never")
    assert shards("llama3_2_1B_full_grpo")


@pytest.fixture
def four_ranks():
    """This process is the first of four; the others do not exist, and collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_what_cannot_be_sharded_is_refused(four_ranks):
    model = build_policy("qlora")
    with pytest.raises(ValueError, match="^distributed.sharding: 4 ranks cannot share"):
        shard(model, device=CPU)


def test_what_a_step_draws_depends_on_nothing_before_it(monkeypatch):
    def drawn(step, seed=7):
        device.seed_step(seed, step)
        return random.random(), np.random.rand(), torch.rand(1).item()

    steps = [drawn(step) for step in (3, 4)]
    assert drawn(3) == steps[0]
    others = [*steps, drawn(4, seed=8), drawn(3, seed=8)]
    monkeypatch.setattr(device, "rank", lambda: 1)
    others += [drawn(2), drawn(3)]  # of the second rank
    assert all(len(set(values)) == len(others) for values in zip(*others))


@pytest.mark.parametrize(
    ("instructions", "dtype"), [(("avx512_bf16",), "bf16"), (("amx_bf16",), "bf16"), ((), "fp32")]
)
def test_dtype_auto_is_what_the_cpu_has_instructions_for(monkeypatch, instructions, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(instructions, True))
    device.multiplies_bf16.cache_clear()
    made = Run(load_config("tiny_arithmetic_grpo", ["dtype=auto"]))
    device.multiplies_bf16.cache_clear()
    assert made.cfg.dtype == made.given.dtype == dtype  # a run's record holds what was chosen
