"""What holds for all tests."""

import gc


def pytest_collection_finish() -> None:
    """Takes what was imported out of the garbage collector's sight.

    Going through it takes 0.2 s, each time that torchtune loads weights, for instance.
    """
    gc.collect()
    gc.freeze()
