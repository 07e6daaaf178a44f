"""The process's one asyncio loop; test_reward_calls.py has what calls do to it, and raise."""

import asyncio
import os
import threading

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
