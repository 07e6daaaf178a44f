"""When a run ends by its evaluations, and which of them was the best: pure decisions."""

from torchtune_grpo.evaluation.stopping import best_step, evaluation_metrics, passes, should_stop


def lines(*values: float, every: int = 5, metric: str = "eval/accuracy") -> list[dict]:
    """The metrics of a run that is evaluated every few steps, with lines of steps between."""
    steps = [{"step": step, "reward": 0.5} for step in range(1, every * len(values))]
    found = [{"step": every * i, metric: value} for i, value in enumerate(values)]
    return sorted([*steps, *found], key=lambda line: line["step"])


def stops(*values: float, stop_at: float | None = None, patience: int | None = None) -> str | None:
    return should_stop(lines(*values), metric=None, stop_at=stop_at, patience=patience)


def test_the_best_step_is_the_first_of_the_highest_that_has_a_checkpoint():
    assert best_step(lines(0.9, 0.2, 0.6, 0.6, 0.4), "eval/accuracy") == 10  # not the base's
    assert best_step(lines(0.9), "eval/accuracy") is None
    assert best_step([], "eval/accuracy") is None
    assert best_step(lines(0.1, 0.2), None) is None
    assert best_step(lines(0.1, 0.2), "eval/pass@1") is None
    assert best_step([*lines(0.1, 0.2), {"step": 9, "eval/accuracy": None}], "eval/accuracy") == 5


def test_a_run_ends_when_its_newest_evaluation_reaches_stop_at():
    assert stops(0.1, 0.89, stop_at=0.9) is None
    reason = stops(0.1, 0.9, stop_at=0.9)
    assert (
        reason
        == "Ends after step 5: eval/accuracy is 0.900, and has reached evaluation.stop_at=0.9."
    )
    assert stops(0.95, stop_at=0.9) is None  # the base: nothing was trained yet
    assert stops(0.1, 0.95, 0.5, stop_at=0.9) is None  # resumed with a lower stop_at
    pass_at_1 = lines(0.1, 0.9, metric="eval/pass@1")
    assert should_stop(pass_at_1, metric="eval/pass@1", stop_at=0.9, patience=None)
    assert not should_stop(pass_at_1, metric=None, stop_at=0.9, patience=None)


def test_a_run_ends_after_so_many_evaluations_that_were_not_its_best():
    assert stops(0.1, 0.5, 0.4, patience=2) is None
    assert stops(0.1, 0.5, 0.4, 0.6, 0.5, patience=2) is None  # counted anew from a new best
    reason = stops(0.1, 0.5, 0.4, 0.5, patience=2)  # as good as the best is not better
    assert reason == (
        "Ends after step 15: the last 2 evaluations were not above the eval/accuracy of 0.500 "
        "after step 5, and evaluation.patience=2."
    )
    assert stops(0.5, 0.4, 0.3, patience=2)  # the base is one to beat
    assert stops(0.5, patience=1) is None
    assert stops(patience=1) is None
    assert stops(0.5, 0.4, 0.3) is None  # neither key is set


def test_the_metrics_of_so_many_samples():
    assert [passes(n) for n in (0, 1, 2, 4, 6)] == [[], [1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]
    assert evaluation_metrics(0) == ["eval/accuracy"]
    assert evaluation_metrics(1) == ["eval/accuracy", "eval/pass@1"]
    assert evaluation_metrics(2) == ["eval/accuracy", "eval/pass@1", "eval/pass@2", "eval/maj@2"]
