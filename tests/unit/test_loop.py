"""The process's one asyncio loop: what one call does to it never harms the next."""

import asyncio
import os
import threading

import pytest

from torchtune_grpo.machine import loop


async def identity():
    await asyncio.sleep(0)
    return asyncio.get_running_loop(), threading.current_thread()


def test_calls_from_many_threads_at_once_share_one_loop(monkeypatch):
    monkeypatch.setattr(loop, "_loop", None)  # none has been made yet
    together, found = threading.Barrier(16), []

    def call():
        together.wait()
        found.append(loop.run(identity()))

    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 and len(set(found)) == 1
    assert loop.run(identity()) == found[0]


def test_a_semaphore_of_the_first_call_serves_the_next():
    semaphore = asyncio.Semaphore(1)

    async def use():
        async with semaphore:
            await asyncio.sleep(0.01)
        return "used"

    async def use_both():
        return await asyncio.gather(use(), use())  # one of them waits, and so binds it to the loop

    assert loop.run(use_both()) == loop.run(use_both()) == ["used", "used"]


@pytest.mark.parametrize(
    "error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit]
)
def test_what_a_call_raises_is_its_own(error):
    before = loop.run(identity())

    async def fail():
        raise error("as you wish")

    with pytest.raises(error, match="as you wish"):
        loop.run(fail())
    assert loop.run(identity()) == before


def test_a_task_that_exits_behind_a_call_ends_nothing():
    before = loop.run(identity())

    async def leave_a_task():
        async def leave():
            raise SystemExit(3)

        task = asyncio.create_task(leave())
        del task
        return "done"

    assert loop.run(leave_a_task()) == "done"
    assert loop.run(identity()) == before


def test_a_forked_process_has_a_loop_of_its_own():
    loop.run(identity())
    if (child := os.fork()) == 0:
        try:
            loop.run(identity())
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
