"""The rewards for choices and short texts against labelled cases, and against hostile texts.

The labels were written by hand, from the rule, before the code.
"""

import time

import pytest

from torchtune_grpo.rewards import Reward, RewardSet, choice_reward, short_text_reward

# A whole completion -> the letter that it states; None: no answer.
CHOICES = {
    # Where an answer is found.
    "<answer>B</answer>": "B",
    "<think>A or C? C.</think>\n<answer>B</answer>": "B",
    "<think>The answer is A.</think>\nThe answer is B.": "B",
    "<think>The answer is A.</think>\nI am not sure.": None,
    r"Mitochondria make ATP, so $\boxed{B}$.": "B",
    "Mitochondria make ATP.\n#### B": "B",
    "Let me think. The answer is (B).": "B",
    "So the final answer is: **B**": "B",
    "The correct answer is (B) Mitochondria.": "B",
    "The correct option is B.": "B",
    "The correct choice is B": "B",
    "Mitochondria make ATP.\n\nAnswer: B": "B",
    "Mitochondria make ATP.\n\n**Answer:** (B) Mitochondria": "B",
    "**Final Answer: B**": "B",
    "**Answer**: B": "B",
    "### Answer: B. Vitamin C": "B",
    'Here it is: {"answer": "B"}': "B",
    "Answer: A? That cannot be.\n\nAnswer: C": "C",
    "The answer is A. No, wait.\n\nThe answer is C.": "C",
    "The incorrect answer is A.": None,
    "B": None,
    "I would choose (B).": None,
    "": None,
    # How a letter is written.
    "<answer>\n(B)\n</answer>": "B",
    "<answer>B)</answer>": "B",
    "<answer>[B]</answer>": "B",
    "<answer>B.</answer>": "B",
    "<answer>B:</answer>": "B",
    "<answer>b</answer>": "B",
    "<answer>(b)</answer>": "B",
    "<answer>**B**</answer>": "B",
    "<answer>`B`</answer>": "B",
    '<answer>"B"</answer>': "B",
    "<answer>$B$</answer>": "B",
    "<answer>(\uff22)</answer>": "B",
    "<answer>Option B</answer>": "B",
    "<answer>option b</answer>": "B",
    "<answer>Answer: B</answer>": "B",
    "<answer>The answer is B</answer>": "B",
    "<answer>J</answer>": "J",
    r"\boxed{\text{B}}": "B",
    r"\boxed{\textbf{(B)}\ 12}": "B",
    r"\boxed{\mathrm{B}}": "B",
    r"The answer is \(B\).": "B",
    # With the option's text.
    "<answer>B. Paris</answer>": "B",
    "<answer>B) Paris</answer>": "B",
    "<answer>B: Paris</answer>": "B",
    "<answer>B - Paris</answer>": "B",
    "<answer>b) Paris</answer>": "B",
    "<answer>**B**. Paris</answer>": "B",
    "<answer>**B. Paris**</answer>": "B",
    "<answer>Option B: Paris</answer>": "B",
    "<answer>B.Paris</answer>": "B",
    "<answer>B is correct</answer>": "B",
    "<answer>B Paris</answer>": "B",
    # The text of the option may have letters of its own.
    "<answer>B. Vitamin C</answer>": "B",
    "<answer>(B) A dog</answer>": "B",
    "<answer>Option (B) Vitamin C</answer>": "B",
    "<answer>Option B: Vitamin C</answer>": "B",
    "<answer>D. Both A and B</answer>": "D",
    "<answer>D) A and B only</answer>": "D",
    "<answer>E. I and III only</answer>": "E",
    "<answer>D. (I) and (II) only</answer>": "D",
    "<answer>B. E. coli</answer>": "B",
    "<answer>B. P(A)P(C)</answer>": "B",
    "<answer>(B) J. K. Rowling</answer>": "B",
    "<answer>C. Because I said so</answer>": "C",
    # A reason is not read.
    "The answer is B because A is too small.": "B",
    "The answer is (B), since (A) is too small.": "B",
    "The answer is B. The article in option A is wrong": "B",
    # Two letters are no answer.
    "<answer>A or B</answer>": None,
    "<answer>B, C</answer>": None,
    "<answer>B/C</answer>": None,
    "<answer>A, B, C, D</answer>": None,
    "<answer>A. B. C. D.</answer>": None,
    "<answer>A B C D</answer>": None,
    "<answer>ABCD</answer>": None,
    "<answer>(B) (C)</answer>": None,
    "<answer>(B) and (C)</answer>": None,
    "<answer>(A) or B</answer>": None,
    "<answer>B. C</answer>": None,
    "<answer>B. Paris\nC. London</answer>": None,
    "<answer>B) Paris or C) London</answer>": None,
    "<answer>B. Paris or C. London</answer>": None,
    "<answer>B. Paris and C. London</answer>": None,
    "<answer>B. Paris, C. London</answer>": None,
    "<answer>Either A or (B)</answer>": None,
    "<answer>Either A or B. Paris</answer>": None,
    "<answer>A.B.C.D</answer>": None,
    "<answer>A+B</answer>": None,
    "<answer>A; B</answer>": None,
    "<answer>B</answer> <answer>C</answer>": None,
    r"\boxed{B} or \boxed{C}": None,
    # But one letter twice is one.
    "<answer>B</answer> <answer>(B)</answer>": "B",
    "<answer>B. Paris (B)</answer>": "B",
    r"\boxed{B}, that is \boxed{\text{B}}": "B",
    # The article and the pronoun, and when they are letters.
    "<answer>A dog</answer>": None,
    "<answer>a dog</answer>": None,
    "<answer>I think so</answer>": None,
    "<answer>I'm not sure</answer>": None,
    "<answer>I think B</answer>": "B",
    "<answer>I choose A</answer>": "A",
    "<answer>A</answer>": "A",
    "<answer>a</answer>": "A",
    "<answer>(A)</answer>": "A",
    "<answer>I</answer>": "I",
    "<answer>A. A dog</answer>": "A",
    "<answer>A is correct</answer>": "A",
    "<answer>Option A fits</answer>": "A",
    # What looks like a letter.
    "<answer>Paris</answer>": None,
    "<answer>Bob</answer>": None,
    "<answer>A-level</answer>": None,
    "<answer>U.S.A.</answer>": None,
    "<answer>2</answer>": None,
    "<answer>K</answer>": None,
    "<answer>none</answer>": None,
    "<answer>not B</answer>": None,
    "<answer>not (B)</answer>": None,
    "<answer>B, not C</answer>": "B",
    "<answer></answer>": None,
    "<answer>B": None,
}


@pytest.mark.parametrize("text", CHOICES, ids=ascii)
def test_stated_choice(text):
    """A text scores for the letter that it states and for no other."""
    letters = "ABCDEFGHIJ"
    scores = choice_reward(prompts=[""] * 10, completions=[text] * 10, answer=[*letters])
    assert [a for a, score in zip(letters, scores) if score] == [*(CHOICES[text] or "")]
    assert Reward("choice", choice_reward).answer_of(text) == CHOICES[text]


# A gold, a whole completion, and whether it is right.
TEXTS = [
    ("Paris", "<answer>Paris</answer>", True),
    ("Paris", "<think>London?</think> <answer>\n  paris. \n</answer>", True),
    ("Paris", "The capital of France is Paris.", False),  # nothing says that this is the answer
    ("Paris", "So the answer is **Paris**.", True),
    ("Paris", "The correct answer is Paris.", True),
    ("Paris", "It was the Romans.\n\n**Answer:** Paris", True),
    ("Paris", "#### Paris", True),
    ("Paris", '```json\n{"answer": "Paris"}\n```', True),
    ("Paris", '{"answer": "Paris"}', True),
    ("Paris", r"\boxed{\text{Paris}}", True),
    ("Paris", r"The answer is $\boxed{\textbf{Paris}}$.", True),
    ("Paris", '<answer>"Paris"</answer>', True),
    ("Paris", "<answer>“Paris.”</answer>", True),
    ("Paris", "<answer>PARIS!</answer>", True),
    ("Paris", "<answer>`Paris`</answer>", True),
    ("Paris", "<answer>*Paris*</answer>", True),
    ("Paris", "<answer>London</answer>", False),
    ("Paris", "<answer>Paris, France</answer>", False),
    ("Paris", "<answer>Paris or London</answer>", False),
    ("Paris", "<answer>Not Paris</answer>", False),
    ("Paris", "<answer>Pariss</answer>", False),
    ("Paris", "<answer>Par is</answer>", False),
    ("Paris", "<answer>Paris</answer> <answer>London</answer>", False),
    ("Paris", "<answer>Paris</answer> <answer>paris.</answer>", True),
    ("Paris", "<answer></answer>", False),
    ("Paris", "", False),
    ("New York", "<answer>new   york</answer>", True),
    ("New York", "<answer>New\nYork</answer>", True),
    ("New York", "<answer>New\u00a0York</answer>", True),
    ("New York", "<answer>NewYork</answer>", False),
    ("The Beatles", "<answer>Beatles</answer>", True),
    ("Beatles", '<answer>"The Beatles"</answer>', True),
    ("Beatles", "<answer>the **Beatles**</answer>", True),
    ("apple", "<answer>An apple.</answer>", True),
    ("apple", "<answer>A apple</answer>", True),
    ("anapple", "<answer>An apple</answer>", False),
    ("The The", "<answer>The The</answer>", True),
    ("The", "<answer>the</answer>", True),
    ("Lord of the Rings", "<answer>Lord of Rings</answer>", False),  # only a leading article
    ("Straße", "<answer>STRASSE</answer>", True),
    ("São Paulo", "<answer>Sa\u0303o Paulo</answer>", True),
    ("São Paulo", "<answer>Sao Paulo</answer>", False),
    ("office", "<answer>o\ufb03ce</answer>", True),
    ("12", "<answer>\uff11\uff12</answer>", True),
    ("L'Hôpital", "<answer>L’Hôpital</answer>", True),
    ("C++", "<answer>C++</answer>", True),
    ("C", "<answer>C++</answer>", False),
    ("C#", "<answer>C</answer>", False),
    ("-5", "<answer>5</answer>", False),
    ("U.S.", "<answer>U.S</answer>", True),
    ("U.S.", "<answer>US</answer>", False),
    ("東京", "<answer>東京。</answer>", True),
    (["New York", "NYC", "New York City"], "<answer>nyc</answer>", True),
    (["New York", "NYC", "New York City"], "<answer>the New York City</answer>", True),
    (["New York", "NYC"], "<answer>New York, NYC</answer>", False),
    (["New York", ""], "<answer>.</answer>", False),
    ([], "<answer></answer>", False),
]


@pytest.mark.parametrize(("gold", "text", "right"), TEXTS, ids=ascii)
def test_short_text(gold, text, right):
    assert short_text_reward(prompts=[""], completions=[text], answer=[gold]) == [float(right)]


def test_votes_among_samples_count_one_spelling():
    answer_of = Reward("text", short_text_reward).answer_of
    assert answer_of("The answer is **The Beatles**.") == "beatles"
    assert answer_of("Beatles") is None
    assert answer_of("<answer>.</answer>") is None


def test_long_answers_are_not_read():
    """Neither one of over 1,000 characters nor several that have more together."""
    choice, text = Reward("choice", choice_reward), Reward("text", short_text_reward)
    assert choice.answer_of(f"<answer>B. {'x' * 997}</answer>") == "B"
    assert choice.answer_of(f"<answer>B. {'x' * 998}</answer>") is None
    assert text.answer_of(f"<answer>{'x' * 1000}</answer>") == "x" * 1000
    assert text.answer_of(f"<answer>{'x' * 1001}</answer>") is None
    blocks = [f"<answer>B{'.' * count}</answer>" for count in range(45)]
    assert choice.answer_of("".join(blocks[:40])) == "B"
    assert choice.answer_of("".join(blocks)) is None


GOLDS = {
    choice_reward: (
        ["B", "(B)", "B.", "B)", "[B]", " b ", "J", "B. Paris", ["B"]],
        ["", "K", "AB", "A or B", "A dog", "Paris", "2", 1, True, None, [], [1], {"B": 1}],
    ),
    short_text_reward: (
        [
            "Paris",
            "New York",
            ["New York", "NYC"],
            ["", "Paris"],
            ("a", "b"),
            "1969",
            "The",
            ["x", None],
        ],
        ["", " ", "...", '""', "x" * 1001, [], [""], [None], 1969, None, {"a": "b"}],
    ),
}


@pytest.mark.parametrize("function", GOLDS)
def test_golds_that_can_be_judged(function):
    """Good ones are right as an answer to themselves; the others are named, and score nothing."""
    reward = Reward("r", function)
    good, bad = GOLDS[function]
    assert reward.row_faults([{"answer": gold} for gold in good]) == {}
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
    assert rewards.decider(None) == "choice"
    assert Reward("text", short_text_reward).decides


SIZE = 200_000
HOSTILE = ["B", "(", "(B", "(B)", "B ", "A ", "I ", "not ", "or B. ", "option ", "answer: ", "\n"]
HOSTILE += ["\nAnswer:", "the correct answer is ", " because", "*", "**B**", "\\text{", "\\", "{}"]
HOSTILE += ["<answer>", "<answer>B</answer>", "\\boxed{B}", "#### ", "“", "'", "\x00", "\ud800"]
HOSTILE += ["\ufdfa", "\u0301\u0327", "\u200b", "\u202e", "\u3000", "．", "the ", "a an the "]


@pytest.mark.parametrize("unit", HOSTILE, ids=ascii)
def test_hostile_texts_take_no_time_and_raise_nothing(unit):
    """Whole, in an answer block, in blocks that all differ, and as a gold."""
    long = unit * (SIZE // len(unit))
    short = (unit * 1000)[:990]
    texts = [long, f"<answer>{long}</answer>", f"The answer is {long}", f"<answer>{short}</answer>"]
    texts.append("".join(f"<answer>{unit * 9}{number}</answer>" for number in range(2000)))
    for function in (choice_reward, short_text_reward):
        check_row = Reward("r", function).check_row
        for text in texts:
            start = time.process_time()
            for gold in ("B", text):
                (score,) = function(prompts=[""], completions=[text], answer=[gold])
                assert score in (0.0, 1.0)
            check_row(answer=text)
            assert time.process_time() - start < 0.5
