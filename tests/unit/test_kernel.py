"""The Triton kernel computes what ``decode_attention`` does, by Triton's interpreter and on a GPU.

The interpreter cannot multiply bf16; for that it is compiled, for every card since Ampere.
"""

import importlib
import logging
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from decode_attention import decode_attention

from torchtune_grpo.rollout import attention
from torchtune_grpo.rollout.attention import kernel_runs
from torchtune_grpo.rollout.cache import CacheShape

pytest.importorskip("triton")

KERNEL = "torchtune_grpo.rollout.kernel"
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
HEADS = [(1, 1, 8), (2, 4, 64), (3, 3, 64), (1, 20, 96), (2, 2, 128)]  # kv heads, group, size
ATOL = {torch.float32: 1e-6, torch.float16: 1e-3}  # half a unit of results up to 4
# The last row is for padding: it has no prompt. Some lengths are whole blocks of the kernel.
PROMPT_LENGTHS, LAST, PROMPT_SLOTS = [300, 17, 17, 128, 0], [0, 149, 64, 1, 100], [0, 2, 2, 1, 0]
SLOTS = [5, 0, 7, 2, 6]  # the others are of rows that pause
POSITIONS = [300, 166, 81, 129, 100]
WINDOWS = [None, 100, 1]  # 100 begins within two prompts, two responses, and before all of a row


# A process of its own: Triton decides for its interpreter when it is imported.
INTERPRETED = """
import runpy, sys, torch
launch = runpy.run_path(sys.argv[2])["launch"]
cases = torch.load(sys.argv[1])
torch.save({name: (launch(*args), args[2]) for name, args in cases.items()}, sys.argv[1])
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict:
    """The result of each case, and the rows' cache after it, by Triton's interpreter."""
    file = tmp_path_factory.mktemp("interpreted") / "cases.pt"
    cases = product(HEADS, ATOL, (False, True), WINDOWS)
    torch.save({(h, d, *o): given(*h, d, *o) for h, d, *o in cases}, file)
    env = os.environ | {"TRITON_INTERPRET": "1"}
    path = Path(attention.__file__).with_name("kernel.py")  # alone: its package takes seconds
    subprocess.run([sys.executable, "-c", INTERPRETED, file, path], env=env, check=True)
    return torch.load(file)


def given(
    kv_heads: int,
    group: int,
    size: int,
    dtype: torch.dtype,
    turns: bool,
    window: int | None,
    *,
    device: str = "cpu",
) -> list:
    """Arguments with NaN after each cached length; the heads are a slice of a wider tensor."""
    generator = torch.Generator().manual_seed(0)
    heads = group + 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    new = normal(len(LAST), heads * kv_heads * size + 7)[:, :-7].unflatten(1, (-1, size))
    prompts, rows = normal(2, 3, kv_heads, 320, size), normal(2, 8, kv_heads, 192, size)
    for slot in PROMPT_SLOTS:
        longest = max(n for n, of in zip(PROMPT_LENGTHS, PROMPT_SLOTS) if of == slot)
        prompts[:, slot, :, longest:] = torch.nan
    for slot in range(8):
        rows[:, slot, :, LAST[SLOTS.index(slot)] if slot in SLOTS else 0 :] = torch.nan
    vectors = SLOTS, PROMPT_SLOTS, PROMPT_LENGTHS, LAST, POSITIONS
    layout = [torch.tensor(vector, device=device) for vector in vectors]
    angles = torch.arange(500)[:, None] / 10 ** torch.arange(size // 2)
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], 1)[:, :, None]
    tensors = [x.to(device, dtype) for x in (new, prompts, rows, table)]
    return [*tensors[:3], *layout, tensors[3] if turns else None, window]


def assert_right(out, rows, args, *, atol: float) -> None:
    """Compare the output and the cache with the reference in float64."""
    tensors = [x.cpu() if isinstance(x, torch.Tensor) else x for x in args]
    wide = [
        x.double().nan_to_num() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in tensors
    ]
    torch.testing.assert_close(out.cpu().double(), decode_attention(*wide), atol=atol, rtol=0)
    torch.testing.assert_close(rows.cpu().double().nan_to_num(), wide[2], atol=atol, rtol=0)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", ATOL, ids=str)
@pytest.mark.parametrize("turns", [False, True], ids=["as_given", "rotated"])
@pytest.mark.parametrize("window", WINDOWS)
def test_it_is_attention_over_prompt_and_response(interpreted, heads, dtype, turns, window):
    args = given(*heads, dtype, turns, window)
    assert_right(*interpreted[heads, dtype, turns, window], args, atol=ATOL[dtype])


@pytest.mark.parametrize("heads", [pytest.param(heads, marks=GPU) for heads in HEADS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turns", [False, True], ids=["as_given", "rotated"])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_gpu_computes_the_same(heads, dtype, turns, window):
    kv_heads, group, size = heads
    shape = CacheShape(1, kv_heads, size, dtype, torch.device("cuda"))
    assert kernel_runs(shape, heads=kv_heads * group)
    args = given(*heads, dtype, turns, window, device="cuda")
    rows = args[2].clone()
    out = attention._decode_attention(*args[:2], rows, *args[3:])
    assert_right(out, rows, args, atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "group", "window"),
    [
        (80, "bf16", 64, 4, False),
        (86, "bf16", 256, 8, False),
        (86, "bf16", 256, 8, True),
        (90, "fp32", 128, 1, False),
        (120, "bf16", 64, 4, False),
    ],
)
def test_it_compiles_for_every_card_since_ampere(capability, dtype, size, group, window):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = importlib.import_module(KERNEL)
    names = kernel._kernel.arg_names
    itemsize = {"bf16": 2, "fp32": 4}[dtype]
    constants = kernel.constants(4, group=group, head_dim=size, itemsize=itemsize)
    constants |= {} if window else {"window": None}
    kinds = {"scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    kinds |= dict.fromkeys(("out", "heads", "prompts", "rows", "table"), f"*{dtype}")
    kinds |= dict.fromkeys(
        ("slots", "prompt_slots", "prompt_lengths", "last", "token_positions"), "*i64"
    )
    source = ASTSource(
        kernel._kernel,
        {name: kinds.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_stages": 2}
    )
    assert compiled.metadata.shared < 99 * 1024  # what a block may have on sm_86


def test_without_triton_or_a_compiler_torch_s_operators_do_it(monkeypatch, caplog):
    def launch(*args):
        raise RuntimeError("Failed to find C compiler. Please specify via CC\nand more")

    monkeypatch.setattr(attention, "_decode_attention", launch)
    monkeypatch.setattr(attention, "is_since_ampere", lambda device: True)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, device, **k: zeros(*a, **k))
    shape = CacheShape(1, 2, 8, torch.float32, torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        assert not kernel_runs(shape, heads=4)
    (said,) = caplog.messages
    assert "Failed to find C compiler" in said and "and more" not in said
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/no/include")
    assert not kernel_runs(shape, heads=4)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    said = "slower: a C compiler and /no/include/Python.h not found; `apt-get install gcc python"
    assert f"{said}{version}-dev`" in caplog.text
