"""What vLLM leaves behind in the trainer's process, and its removal."""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
# Functions and classes that vLLM replaces when it is imported or starts, most of them on CPUs only.
REPLACED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (sys, ("excepthook",)),
    (torch, ("set_num_threads", "Event")),
    (torch.accelerator, ("synchronize", "empty_cache", "get_memory_info")),
    (torch.cuda, ("Event", "Stream", "set_stream", "current_stream", "stream")),
    (torch.Tensor, ("pin_memory", "record_stream")),
)
_vllms: dict[tuple[Any, str], object] = {}  # what it has put there, for its next call


@contextmanager
def contained() -> Iterator[None]:
    """Give vLLM its own surroundings for the time of a call: all that it changes comes back.

    That is the environment, random numbers, and the functions that it replaces.
    """
    ours = {(at, name): getattr(at, name) for at, names in REPLACED for name in names}
    environment = dict(os.environ)
    python, numpy = random.getstate(), np.random.get_state()
    for (at, name), value in _vllms.items():
        setattr(at, name, value)
    os.environ.update(_ENVIRONMENT)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        now = dict(os.environ)
        for key in now.keys() - environment.keys():
            del os.environ[key]
        os.environ.update({k: v for k, v in environment.items() if now.get(k) != v})
        for (at, name), value in ours.items():
            if getattr(at, name) is not value:
                _vllms[at, name] = getattr(at, name)
                setattr(at, name, value)
        random.setstate(python)
        np.random.set_state(numpy)


def end(client: Any, *, owns_group: bool) -> None:
    """End vLLM, given the client of its engine; a process group that it shares with ranks stays.

    Its own end would leave that, too; so only its worker ends, and the next one finds all else.
    """
    with contained():
        if owns_group:
            client.shutdown()
        elif client._finalizer.detach() is not None:
            client.engine_core.model_executor.shutdown()
            gc.unfreeze()
