"""What holds for all tests."""

import gc
import logging
import os

import pytest

# One thread per pytest worker: forked ranks hang if torch has already started others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A reward under test may close its event loop; what is left there is told of when it is collected,
# in the middle of some other test.
logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the longest tests: at the end, one worker would have them alone."""
    items.sort(key=lambda item: item.path.name != "test_smollm2.py")


def pytest_collection_finish() -> None:
    """Takes what was imported out of the garbage collector's sight.

    Going through it takes 0.2 s, each time that torchtune loads weights, for instance.
    """
    gc.collect()
    gc.freeze()
