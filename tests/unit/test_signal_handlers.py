"""Which signals a run handles, and that it gives them back."""

import os
import pty
import signal
import threading

import pytest

from torchtune_grpo.machine.interrupt import SIGNALS, Interrupts, breakable, check, is_interrupted


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in SIGNALS}
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


def test_an_echo_at_the_end_does_not_kill():
    """The second of two signals, a moment after the run has saved and ended."""
    signal.signal(signal.SIGINT, lambda *_: pytest.fail("it is no second Ctrl-C"))
    run = Interrupts()
    echo = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with run.handled(echo.start):
        os.kill(os.getpid(), signal.SIGTERM)
        check()
    echo.join()
    assert run.exit_code == 143


def test_a_closed_terminal_ends_a_run_that_cannot_say_so(monkeypatch):
    """Also one that Ctrl-C has asked to end, whose checkpoint may be half written."""
    stderr, (terminal, slave) = os.dup(2), pty.openpty()
    os.close(terminal)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda *_: pytest.fail("it is not handled"))
    monkeypatch.setattr("torchtune_grpo.machine.interrupt.ECHO_SECONDS", 0.0)
    for first in (signal.SIGHUP, signal.SIGINT):
        run = Interrupts()
        run.leave = pytest.fail
        try:
            os.dup2(slave, 2)
            with run.handled(lambda: None):
                os.kill(os.getpid(), first)
                os.kill(os.getpid(), signal.SIGHUP)
                check()
        finally:
            os.dup2(stderr, 2)
        assert run.exit_code == 128 + first
    os.close(slave)
    os.close(stderr)


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
