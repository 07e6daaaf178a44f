"""What a report says of a run's metrics."""

from torchtune_grpo import report

RECORDS = [
    {"step": 0, "eval/accuracy": 0.25},
    {"step": 1, "reward": 0.5, "reward_std_in_group": 0.1},
    {"step": 2, "reward": 0.75, "reward_std_in_group": 0.2, "eval/accuracy": None},
    {"step": 3, "reward": 1.0, "reward_std_in_group": 0.0, "eval/accuracy": 0.5},
]


def test_series_hold_the_steps_at_which_a_metric_was_recorded():
    assert report.series(RECORDS, "eval/accuracy") == ([0, 3], [0.25, 0.5])
    assert report.series(RECORDS, "nothing") == ([], [])


def test_a_run_with_nulls_is_drawn(tmp_path):
    nulls = {"reward": 1.0, "reward_std_in_group": None, "eval/pass@1": None}
    report.draw_reward_curve([*RECORDS, {"step": 4, **nulls}], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert len(report.summary([*RECORDS, {"step": 4, **nulls}])) == 1


def test_the_summary_tells_the_first_and_the_last_value():
    (line,) = report.summary(RECORDS)
    assert line == "held-out accuracy: 0.250 before (step 0), 0.500 after (step 3)"
