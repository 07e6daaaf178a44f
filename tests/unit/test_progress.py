"""Display of a run's progress, with a terminal and without."""

import io
import re
import time

import pytest
from tqdm import tqdm

from torchtune_grpo.machine import progress
from torchtune_grpo.machine.progress import BAR_FORMAT, Meter
from torchtune_grpo.monitor import terminal
from torchtune_grpo.monitor.terminal import ProgressLine
from torchtune_grpo.rollout.request import Progress

METRICS = {"reward": -0.25, "rewards/a/mean": 0.5, "frac_informative_groups": 0.75}
METRICS["tokens_per_second"] = 2104.0
SHOWN = "reward -0.25, accuracy 0.50, informative 0.75, 2.10k tok/s"
ROLLOUT = f"rollout {Progress(tokens=1_234_567, finished=4000, live=96, rows=4096)}"


def make_progress() -> ProgressLine:
    return ProgressLine(5, done=3, deciding={"rewards/a/mean": "accuracy"})


@pytest.mark.parametrize("said", [SHOWN, ROLLOUT])
def test_a_long_run_fits_80_columns(said):
    settings = dict(prefix="", bar_format=BAR_FORMAT, postfix=said, rate=1 / 3800)
    line = tqdm.format_meter(n=999, total=1000, elapsed=999 * 3800.0, ncols=80, **settings)
    assert len(line) <= 80 and line.endswith(said) and line.startswith("999/1000 ")
    assert "<1:03:20" in line


def test_without_a_terminal_each_step_is_a_line(capsys, caplog, monkeypatch):
    """The time left is that of the steps since the run was resumed, evaluations included."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with make_progress() as shown:
        shown.rollout(Progress(tokens=1, finished=0, live=1, rows=1))
        now[0] += 90.0
        shown.step_done(4, METRICS)
        shown.step_done(5, {"reward": 1.0, "tokens_per_second": 10.0})  # what it lacks is not shown
    first, second = caplog.messages
    assert first == f"Step 4/5: {SHOWN}, 01:30 left"
    assert second.startswith("Step 5/5: reward 1.00, 10.0 tok/s, ")
    assert "\r" not in "".join(capsys.readouterr())


def test_without_a_terminal_the_innermost_meter_speaks_now_and_then(capsys, monkeypatch):
    """It does whatever this thread is busy with; what was there before says nothing of the time."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.2)
    said = lambda: capsys.readouterr().err.splitlines()  # noqa: E731
    with Meter("Step", total=100, is_run=True):
        with Meter("Evaluation", total=400) as meter:
            meter.skip(100)
            meter.show(done=250, tokens=5000)
            time.sleep(0.5)
            assert re.fullmatch(r"Evaluation 250/400: \S+ tok/s, 00:00 left", said()[-1])
        time.sleep(0.3)
        assert said()[0] == "Step 0/100: begins"
    time.sleep(0.3)
    assert not said()


def test_on_a_terminal_lines_and_the_bar_do_not_mix(monkeypatch):
    monkeypatch.setattr("sys.stderr", screen := io.StringIO())
    monkeypatch.setattr(screen, "isatty", lambda: True)
    with make_progress() as shown:
        shown.step_done(4, METRICS)
        terminal.log.warning("a line")
    said = screen.getvalue()
    assert "4/5 " in said and said.count("\n") == 2 and "reward -0.25" in said
    before, _, after = said.partition("a line\n")
    assert before.endswith("\r") and after.startswith("\r")  # the bar is cleared, and drawn anew
