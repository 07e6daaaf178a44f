"""Prompts and scores of reasoning-gym."""

import sys
from contextlib import contextmanager
from decimal import Decimal

import pytest
from processes import children

from torchtune_grpo.data import reasoning_gym_dataset
from torchtune_grpo.rewards import RewardSet

pytest.importorskip("reasoning_gym")
REWARD = {"_component_": "torchtune_grpo.rewards.ReasoningGymReward", "timeout": 2.0, "workers": 1}
SHORT = {"max_terms": 2, "max_digits": 1}


def data(tokenizer, task="chain_sum", split="train", num_samples=40, **options):
    made = reasoning_gym_dataset(
        tokenizer, task=task, split=split, num_samples=num_samples, **options
    )
    return [made[i] for i in range(len(made))]


@contextmanager
def scorer(**node):
    """Score texts that answer one item."""
    rewards = RewardSet.from_config([REWARD | node])

    def score(item, *texts):
        columns = {name: [value] * len(texts) for name, value in item["columns"].items()}
        prompts = [item["prompt"].text] * len(texts)
        return rewards(prompts=prompts, completions=texts, columns=columns).total.tolist()

    yield score
    rewards.close()


@pytest.fixture(scope="module")
def scores():
    with scorer() as score:
        yield score
    assert not children()


def test_no_question_is_asked_twice_or_in_both_splits(llama3_tokenizer):
    """Also in another order of its numbers, although different seeds share most of these sums."""
    train = data(llama3_tokenizer, num_samples=100, seed=1, settings=SHORT)
    test = data(llama3_tokenizer, split="test", num_samples=30, seed=2, settings=SHORT)
    asked = [item["prompt"].text for item in train + test]
    numbers = [{str(sorted(item["prompt"].text)) for item in items} for items in (train, test)]
    assert len({*asked}) == 130 and not numbers[0] & numbers[1]
    assert train == data(llama3_tokenizer, num_samples=100, seed=1, settings=SHORT)
    assert train != data(llama3_tokenizer, num_samples=100, seed=3, settings=SHORT)
    with pytest.raises(ValueError, match="num_samples=900: task=chain_sum has only .* test"):
        data(llama3_tokenizer, split="test", num_samples=900, settings=SHORT)


# The metadata of the last are not JSON.
TASKS = ["chain_sum", "spell_backward", "knights_knaves", "sudoku", "gsm_symbolic"]


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_gold_scores_1_and_another_less(llama3_tokenizer, scores, task):
    item, other = data(llama3_tokenizer, task, num_samples=2)
    gold, wrong = item["columns"]["answer"], other["columns"]["answer"]
    texts = [f"<answer>{gold}</answer>", f"The answer is {gold}", f"<think>{wrong}</think>{gold}"]
    assert scores(item, *texts) == [1.0] * 3
    two = f"<answer>{gold}</answer><answer>{wrong}</answer>"
    assert scores(item, f"<answer>{wrong}</answer>", two, "") == [0.0] * 3


def test_the_scorer_knows_the_settings(llama3_tokenizer, scores):
    """Their number of decimal places is its tolerance."""
    settings = {"max_num_decimal_places": 8}
    item, *_ = data(llama3_tokenizer, "decimal_arithmetic", num_samples=1, settings=settings)
    gold = Decimal(item["columns"]["answer"])
    assert scores(item, str(gold), str(gold + Decimal("1e-7"))) == [1.0, 0.0]


def test_a_full_stop_counts_where_the_gold_has_one(llama3_tokenizer, scores):
    item, *_ = data(llama3_tokenizer, "lcm", num_samples=1)
    gold = item["columns"]["answer"]
    assert scores(item, f"The answer is {gold}.", f"The answer is {gold}!") == [1.0, 0.0]
    sentences = data(llama3_tokenizer, "sentence_reordering", num_samples=10)
    item = next(each for each in sentences if each["columns"]["answer"].endswith("."))
    assert scores(item, item["columns"]["answer"]) == [1.0]


@pytest.mark.slow
def test_scores_in_part_are_given_when_asked_for(llama3_tokenizer):
    """Here for an answer that contains the gold; then the reward does not tell right from wrong."""
    item, *_ = data(llama3_tokenizer, "lcm", num_samples=1)
    gold = item["columns"]["answer"]
    with scorer(partial=True) as scores:
        right, longer = scores(item, gold, f"1{gold}")
    assert right == 1.0 and longer == pytest.approx(len(gold) / (len(gold) + 1))


@pytest.mark.parametrize("name", ["ReasoningGymReward", "ProgramReward"])
def test_isolation_does_not_change_what_decides(name):
    """These run in processes of their own, with or without it."""
    for more in ({}, {"isolation": "process", "timeout": 3.0, "workers": 1}):
        for is_partial in (False, True):
            node = {"_component_": f"torchtune_grpo.rewards.{name}", "partial": is_partial, **more}
            assert RewardSet.from_config([node]).decider.is_known is not is_partial


@pytest.mark.slow
def test_scorers_that_evaluate_the_answer_are_kept_apart(llama3_tokenizer, scores):
    """Reasoning-gym calls `eval` with what was said of queens."""
    item, *_ = data(llama3_tokenizer, "n_queens", num_samples=1)
    hostile = ["__import__('os')._exit(1)", "exit()", "__import__('time').sleep(60)", "1/0"]
    assert scores(item, *hostile, item["columns"]["answer"]) == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_tasks_that_cannot_be_had(llama3_tokenizer, monkeypatch):
    with pytest.raises(ValueError, match=r"task=letter_count: not among .* letter_counting"):
        data(llama3_tokenizer, "letter_count")
    with pytest.raises(ValueError, match=r"task=word_ladder: not among .* word_sorting"):
        data(llama3_tokenizer, "word_ladder")
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ValueError, match=r"task=gcd: needs: pip install 'reasoning-gym<0.2'"):
        data(llama3_tokenizer, "gcd")
