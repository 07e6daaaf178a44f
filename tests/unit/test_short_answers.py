"""The rewards for choices and short texts against labelled cases.

``data/short_answer_cases.jsonl`` holds whole completions: with the letter that each states, or with
a gold and whether it is right. The labels were written by hand, from the rule, before the code.
"""

import json
from pathlib import Path

import pytest

from torchtune_grpo.rewards import Reward, RewardSet, choice_reward, short_text_reward

FILE = Path(__file__).parent / "data/short_answer_cases.jsonl"
CASES = [json.loads(line) for line in FILE.read_text(encoding="ascii").splitlines()]
CHOICES = [case for case in CASES if case["reward"] == "choice"]
LETTERS = "ABCDEFGHIJ"


@pytest.mark.parametrize("category", sorted({case["category"] for case in CHOICES}))
def test_stated_choice(category):
    """A text scores for the letter that it states and for no other."""
    answer_of, stated, scored = Reward("choice", choice_reward).answer_of, {}, {}
    for case in (case for case in CHOICES if case["category"] == category):
        text, letter = case["text"], case["states"]
        scores = choice_reward(prompts=[""] * 10, completions=[text] * 10, answer=[*LETTERS])
        stated[text] = letter, [*(letter or "")]
        scored[text] = answer_of(text), [a for a, score in zip(LETTERS, scores) if score]
    assert scored == stated


def test_short_texts():
    cases = [case for case in CASES if case["reward"] == "text"]
    texts, golds = ([case[key] for case in cases] for key in ("text", "gold"))
    scores = short_text_reward(prompts=[""] * len(cases), completions=texts, answer=golds)
    assert [case for case, score in zip(cases, scores) if score != case["correct"]] == []


def test_votes_among_samples_count_one_spelling():
    answer_of = Reward("text", short_text_reward).answer_of
    assert answer_of("The answer is **The Beatles**.") == "beatles"
    assert answer_of("Beatles") == "beatles"
    assert answer_of("<answer>.</answer>") is None


def test_long_answers_are_not_read():
    """Neither one of over 1,000 characters nor more than 20 different ones."""
    choice, text = Reward("choice", choice_reward), Reward("text", short_text_reward)
    assert choice.answer_of(f"<answer>B. {'x' * 997}</answer>") == "B"
    assert choice.answer_of(f"<answer>B. {'x' * 998}</answer>") is None
    assert text.answer_of(f"<answer>{'x' * 1000}</answer>") == "x" * 1000
    assert text.answer_of(f"<answer>{'x' * 1001}</answer>") is None
    blocks = [f"<answer>B{'.' * count}</answer>" for count in range(21)]
    assert choice.answer_of("".join(blocks[:20])) == "B"
    assert choice.answer_of("".join(blocks)) is None


GOLDS = {
    choice_reward: (
        ["B", "(B)", "B.", "B)", "[B]", " b ", "J", "B. Paris", ["B"]],
        ["", "K", "AB", "A or B", "A dog", "Paris", "2", 1, True, None, [], [1], {"B": 1}],
    ),
    short_text_reward: (
        ["Paris", "1969", "The", ["New York", "NYC"], ["", "Paris"], ("a", "b"), ["x", None]],
        ["", " ", "...", '""', "x" * 1001, [], [""], [None], 1969, None, {"a": "b"}],
    ),
}


@pytest.mark.parametrize("function", GOLDS)
def test_golds_that_can_be_judged(function):
    """Good ones are right as an answer to themselves; the others are named, and score nothing."""
    reward = Reward("r", function)
    good, bad = GOLDS[function]
    assert not any(reward.row_faults([{"answer": gold} for gold in good]).values())
    faults = reward.row_faults([{"answer": gold} for gold in bad])
    assert [*faults] == [*range(len(bad))]
    assert all(fault.startswith("answer=") and len(fault) < 200 for fault in faults.values())
    for gold in good:
        stated = [gold] if isinstance(gold, str) else [each for each in gold if each]
        texts = [f"<answer>{each}</answer>" for each in stated]
        same = [gold] * len(texts)
        assert function(prompts=texts, completions=texts, answer=same) == [1.0] * len(texts)
    for gold in bad:
        texts = ["<answer></answer>", f"<answer>{gold}</answer>", "<answer>B</answer>"]
        assert function(prompts=texts, completions=texts, answer=[gold] * 3) == [0.0] * 3


def test_they_decide_what_is_right():
    rewards = RewardSet([Reward("f", lambda **given: [0.0]), Reward("choice", choice_reward)])
    assert rewards.decider.name == "choice"
    assert Reward("text", short_text_reward).decides
