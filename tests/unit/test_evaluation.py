"""Answers -> accuracy, pass@k, maj@k, by hand, on a split that ranks share; and who is lenient."""

from types import SimpleNamespace

import pytest
import torch

from torchtune_grpo.evaluation import evaluator as evaluation
from torchtune_grpo.evaluation.evaluator import Evaluator
from torchtune_grpo.rewards import Reward, RewardSet, SymbolicMathReward, last_number_reward
from torchtune_grpo.rewards.math import stated_answer
from torchtune_grpo.rollout import SamplingParams


class Split(list):
    """Prompts of a data set."""

    prefill = ""


def correct(prompts, completions, **columns):
    """None, which counts as wrong, for a text that gives up."""
    return [None if c == "?" else float(c == "right") for c in completions]


def length(prompts, completions, trainer_state, **columns):
    assert trainer_state == "state"
    return [9.0] * len(completions)


correct.answer_of = lambda text: None if text == "?" else text


def fake_roll_out(engine, prompts, *, group_size, params, seed, step, **_):
    """Prompt p's sample s of 4 is right if s < p; greedy ones are if p is odd; 4 is cut off."""
    assert (seed, step) == (3, -1)
    if params.temperature == 0:
        assert group_size == 1 and params.top_k is None and params.min_new_tokens == 1
        texts = ["right" if p % 2 else "?" for p in prompts.indices]
    else:
        assert params.temperature == 0.7 and params.top_k == 5 and group_size == 4
        texts = ["right" if s < p else "wrong" for p in prompts.indices for s in range(4)]
    rows = [p for p in prompts.indices for _ in range(group_size)]
    return SimpleNamespace(
        prompts=rows,
        completions=texts,
        columns={"n": rows},
        completion_ids=[[0]] * len(rows),
        response_lengths=torch.tensor(rows) + 1,
        truncated=torch.tensor(rows) == 4,
    )


def make(size: int, **changes) -> Evaluator:
    params = SamplingParams(max_generated_tokens=4, temperature=0.7, top_k=5, min_new_tokens=1)
    keys = dict(reward="correct", samples=4, keep_best=None)
    evaluation = SimpleNamespace(**keys | changes)
    cfg = SimpleNamespace(eval_sampling_params=params, seed=3, evaluation=evaluation)
    rewards = RewardSet([Reward("length", length), Reward("correct", correct)])
    rows = ({"index": i, "tokens": [i], "prompt": str(i), "columns": {"n": i}} for i in range(size))
    return Evaluator(cfg, Split(rows), tokenizer=None, rewards=rewards)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_share_the_prompts_and_agree(ranks, monkeypatch):
    """Each prompt counts once on any number of ranks, more than there are prompts included."""
    monkeypatch.setattr(evaluation, "roll_out", fake_roll_out)
    monkeypatch.setattr(evaluation, "world_size", lambda: ranks)
    gathered: list[list] = []

    def gather(answered):
        gathered.append(answered)
        return gathered

    monkeypatch.setattr(evaluation, "gather_over_ranks", gather)
    for rank in range(ranks):  # the last one finds the answers of all others
        monkeypatch.setattr(evaluation, "rank", lambda rank=rank: rank)
        result = make(5)(None, state="state")
    metrics = result.metrics
    assert 0 < result.seconds < 60
    values = {name: v for name, v in metrics.items() if not name.endswith(("/low", "/high"))}
    # 0, 1, 2, 3, 4 of 4 samples are right. Two of them miss with C(4 - c, 2) of 6 pairs. The vote
    # is right for 3 and 4, and for 2, where both answers have two votes and the right one is first.
    assert values == pytest.approx(
        {
            "eval/accuracy": 2 / 5,
            "eval/pass@1": (0 + 1 + 2 + 3 + 4) / 20,
            "eval/pass@2": (0 + 3 / 6 + 5 / 6 + 1 + 1) / 5,
            "eval/pass@4": 4 / 5,
            "eval/maj@4": 3 / 5,
            "eval/mean_length": 3.0,
            "eval/clipped_ratio": 1 / 5,
        }
    )
    scored = [name for name in values if f"{name}/low" in metrics]
    assert len(metrics) == 7 + 2 * len(scored) and len(scored) == 5
    assert all(metrics[f"{n}/low"] < metrics[n] < metrics[f"{n}/high"] for n in scored)
    prompts = result.prompts
    assert prompts["prompt_index"] == [0, 1, 2, 3, 4]
    assert prompts["accuracy"] == [0, 1, 0, 1, 0] and prompts["pass@1"] == [0, 0.25, 0.5, 0.75, 1]
    assert prompts["maj@4"] == [0, 0, 1, 1, 1]


def test_without_samples_there_is_the_greedy_answer_alone(monkeypatch):
    monkeypatch.setattr(evaluation, "roll_out", fake_roll_out)
    result = make(5, samples=0)(None, state="state")
    names = {name.removesuffix("/low").removesuffix("/high") for name in result.metrics}
    assert names == {"eval/accuracy", "eval/mean_length", "eval/clipped_ratio"}
    assert [*result.prompts] == ["prompt_index", "accuracy"]


def test_a_reward_that_cannot_do_it_is_refused():
    with pytest.raises(ValueError, match="no reward of this name; rewards has length, correct"):
        make(1, reward="corect")
    with pytest.raises(ValueError, match="keep_best=eval/maj@4: is not measured; give one of eval"):
        make(1, reward=None, keep_best="eval/maj@4")
    make(1, keep_best="eval/maj@4")


def test_the_lenient_grader_reads_the_last_number():
    texts = {
        "<think>3+4</think><answer>7</answer>": 1,
        "5 + 2 = $7.00": 1,
        "<answer>7</answer> as 10-3 is 7,": 1,  # a minus that subtracts, a comma that ends
        "<answer>7</answer> in 2 steps": 0,
        "It is -7": 0,
        "7 or 17": 0,
        "no number": 0,
        "": 0,
    }
    count = len(texts)
    found = last_number_reward([""] * count, [*texts], answer=["7"] * count)
    assert dict(zip(texts, found, strict=True)) == texts


def test_answers_of_one_value_vote_together():
    """Whatever the spelling; and each reward says what it sees itself."""
    spellings = ["7", "7.0", "$7", "14/2", r"\boxed{7}", "7 apples"]
    assert {stated_answer(f"<answer>{text}</answer>") for text in spellings} == {"7"}
    assert stated_answer("<answer>1,000.50</answer>") == "2001/2"
    assert stated_answer("<answer>7</answer><answer>8</answer>") is None
    assert stated_answer("7") is stated_answer("<answer>x</answer>") is None
    long = "1" * 300
    assert stated_answer(f"<answer>{long}</answer>") == long
    lenient = Reward("last", last_number_reward).answer_of
    assert lenient is not None and lenient("7 or 8.50") == "17/2" and lenient("none") is None
    assert SymbolicMathReward.answer_of(r"<answer>\sqrt{2}</answer>") == r"\sqrt{2}"
    assert Reward("length", length).answer_of is None
