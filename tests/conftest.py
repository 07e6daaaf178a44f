"""Settings of all tests."""

import gc
import logging
import os

import pytest

gc.disable()  # until all is imported, a quarter of whose time it would take

# One thread per pytest worker: forked ranks hang if torch has already started others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A reward under test may close its event loop; what is left there is told of when it is collected,
# in the middle of some other test.
logging.getLogger("asyncio").setLevel(logging.CRITICAL)

# Tests kill processes, not the machine: what is written survives without waiting for the disk.
os.fsync = lambda descriptor: None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first: at the end, one worker would run them alone."""
    longest = ("test_smollm2.py", "test_distributed.py", "test_interrupt.py", "test_plugin.py")
    order = {name: place for place, name in enumerate(longest)}
    items.sort(key=lambda item: order.get(item.path.name, 5 + (item.path.parent.name != "recipes")))


def pytest_collection_finish() -> None:
    """Exclude what was imported from garbage collection.

    Going through it takes 0.2 s, each time that torchtune loads weights, for instance.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
