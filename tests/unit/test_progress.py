"""What is shown of a run's progress, with a terminal and without."""

import io

import pytest
from tqdm import tqdm

from torchtune_grpo import progress
from torchtune_grpo.progress import RunProgress
from torchtune_grpo.rollout import Progress

METRICS = {
    "reward": 0.25,
    "step_time": 1.5,
    "frac_informative_groups": 1.0,
    "completions/clipped_ratio": 0.0,
    "entropy": 1.0,
}


@pytest.mark.parametrize("rate", [0.03, 4000.0])
def test_a_long_run_fits_80_columns(rate):
    said = f"rollout {Progress(tokens=1_234_567, finished=4000, live=96, rows=4096)}"
    n = 999
    settings = dict(prefix="GRPO", bar_format=progress._FORMAT, postfix=f", {said}", rate=rate)
    line = tqdm.format_meter(n=n, total=1000, elapsed=n / 0.03, ncols=80, **settings)
    assert len(line) <= 80 and line.endswith(said) and line.startswith("GRPO 999/1000 |")


def test_without_a_terminal_each_step_is_a_line(capsys, caplog):
    with RunProgress(5, done=3) as shown:
        shown.rollout(Progress(tokens=1, finished=0, live=1, rows=1))
        shown.step_done(4, METRICS)
    assert caplog.messages == ["Step 4/5: reward 0.250, 1.5 s"]
    assert "\r" not in "".join(capsys.readouterr())


def test_on_a_terminal_lines_and_the_bar_do_not_mix(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with RunProgress(5, done=3) as shown:
        shown.step_done(4, METRICS)
        progress.log.warning("a line")
    said = terminal.getvalue()
    assert "GRPO 4/5 |" in said and said.count("\n") == 2 and "reward 0.250" in said
    before, _, after = said.partition("a line\n")
    assert before.endswith("\r") and after.startswith("\r")  # the bar is cleared, and drawn anew
