"""Which signals a run handles, and that it gives them back."""

import os
import signal
import threading

import pytest

from torchtune_grpo.machine.interrupt import Interrupts, breakable, check, is_interrupted


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_are_those_of_before_afterwards():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, mine := lambda *_: None)
    stopped, run = [], Interrupts()
    with run.handled(lambda: stopped.append(is_interrupted())):
        os.kill(os.getpid(), signal.SIGTERM)
        assert is_interrupted()  # nothing is raised where all may go on
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun and Slurm may both send it
        breakable(lambda: pytest.fail("there is no time to begin"))
    assert stopped == [True] and run.exit_code == 143 and not is_interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is mine
    check()  # of no run
    assert breakable(lambda: 7) == 7


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts().handled(pytest.fail):
        os.kill(os.getpid(), signal.SIGINT)
        check()


def test_off_the_main_thread_no_handler_is_touched():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def train():
        with Interrupts().handled(pytest.fail):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [before]
