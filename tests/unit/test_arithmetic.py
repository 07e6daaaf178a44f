"""The synthetic problems are right, seeded, and their splits have no problem in common."""

import itertools
import re
from collections import Counter

import pytest

from torchtune_grpo.data.presets import LEVELS, _split_of, arithmetic_problems

# Level 1 has only a few dozen problems in its test split.
SIZES = {level: 15 if level == 1 else 300 for level in LEVELS}
ACTS = {"finds": "+", "buys": "+", "gets": "+", "wins": "+"}
ACTS |= {"loses": "-", "sells": "-", "gives away": "-", "lends out": "-"}


def answer_from_question(question: str) -> int:
    """Reads the question alone, as a pupil would: an oracle that shares no code with the maker."""
    if question.startswith("What is "):
        return eval(question.removeprefix("What is ").removesuffix("?"))  # our own digits and signs
    story = question.split(". How many")[0]
    first = re.search(r"has (\d+) (?:\w+ of (\d+) )?", story)
    value = int(first[1]) * int(first[2] or 1)
    acts = "|".join(ACTS)
    for act, number, friends in re.findall(rf"({acts}) (\d+)|among (\d+) friends", story):
        if friends:
            assert value % int(friends) == 0
            value //= int(friends)
        else:
            value += int(number) if ACTS[act] == "+" else -int(number)
    return value


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_and_worked_steps_are_right(level, split):
    rows = arithmetic_problems(levels=level, split=split, num_samples=SIZES[level], seed=3)
    assert len({row["question"] for row in rows}) == SIZES[level]
    for row in rows:
        assert row["level"] == level
        assert int(row["answer"]) == answer_from_question(row["question"]), row
        *lines, last = row["solution"].split("\n")
        assert last == f"#### {row['answer']}"
        for line in lines:
            left, right = line.split("=")
            assert eval(left) == int(right) >= 0, line
        assert lines[-1].endswith(f"={row['answer']}")


@pytest.mark.parametrize("level", LEVELS)
def test_splits_share_no_problem_whatever_the_seeds(level):
    size = SIZES[level]
    test = arithmetic_problems(levels=level, split="test", num_samples=size, seed=1)
    train = arithmetic_problems(levels=level, split="train", num_samples=2 * size, seed=2)
    assert {row["question"] for row in test}.isdisjoint(row["question"] for row in train)


def test_the_same_seed_gives_the_same_problems_and_another_gives_others():
    make = lambda seed: arithmetic_problems(levels=[2, 6], split="train", num_samples=40, seed=seed)  # noqa: E731
    assert make(0) == make(0)
    assert make(0) != make(1)
    assert [row["level"] for row in make(0)] == [2, 6] * 20


def test_a_level_without_problems_left_leaves_the_rest_to_the_others():
    rows = arithmetic_problems(levels=[1, 2, 3], split="train", num_samples=1000)
    assert [row["level"] for row in rows[:6]] == [1, 2, 3] * 2
    assert Counter(row["level"] for row in rows) == {1: 80, 2: 460, 3: 460}
    assert len({row["question"] for row in rows}) == 1000


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"levels": 9}, "levels=9: give some of .1, 2,"),
        ({"levels": 1, "num_samples": 1000}, "80 were found. Lower num_samples"),
        ({"levels": [1, 2], "num_samples": 9000}, "than levels .1, 2. have"),
    ],
)
def test_bad_arguments_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        arithmetic_problems(**{"levels": 2, "split": "train", "num_samples": 4, **bad})


def test_numbers_that_may_swap_places_do_not_change_the_split():
    for a, b in itertools.product(range(1, 10), repeat=2):
        assert _split_of((("+", a), ("*", b))) == _split_of((("+", b), ("*", a)))
        orders = itertools.permutations([("+", a), ("+", b), ("-", 1)])
        assert len({_split_of(chain) for chain in orders if chain[0][0] == "+"}) == 1
