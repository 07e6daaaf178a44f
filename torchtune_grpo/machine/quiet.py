"""torchtune and torch say what nobody has to know; here they do not."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torchtune import training, utils


@contextmanager
def quiet() -> Iterator[None]:
    """torchtune's log, which is ours too, has warnings only."""
    log = utils.get_logger()
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def set_seed(seed: int) -> int:
    """torchtune's: each rank's own seed, of all generators."""
    with quiet():
        return training.set_seed(seed=seed)


def no_advice() -> None:
    """Drops torch's warnings about what a user cannot change."""
    # where the first step has nothing to train on, and only the rate moves on
    warnings.filterwarnings("ignore", message=r"Detected call of .lr_scheduler\.step")
    # torchao's 8-bit optimizers, in their first step
    warnings.filterwarnings("ignore", message=".*does not implement _stable_hash_for_caching")
