"""A tiny model gets one thread, unless the user has chosen."""

import pytest
import torch
from torch import nn

from torchtune_grpo.machine.device import MANY_PARAMETERS, limit_threads


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
        (None, MANY_PARAMETERS - 1, 1),
        (None, MANY_PARAMETERS, 2),
        ("OMP_NUM_THREADS", 1, 2),
        ("MKL_NUM_THREADS", 1, 2),
    ],
)
def test_the_model_size_decides_unless_the_user_has(two_threads, variable, parameters, threads):
    if variable:
        two_threads.setenv(variable, "2")
    limit_threads(nn.Linear(parameters, 1, bias=False, device="meta"))
    assert torch.get_num_threads() == threads
