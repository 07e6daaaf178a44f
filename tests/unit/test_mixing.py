"""Several data sets as one: whose turn it is, what rows get, and what is refused."""

import random

import pytest
import torch
from omegaconf import OmegaConf
from rows import Bytes

from torchtune_grpo.config.check import instantiate
from torchtune_grpo.data import MixedSampler
from torchtune_grpo.data.dataset import collate_prompts, first_prompts
from torchtune_grpo.data.samplers import make_sampler
from torchtune_grpo.rewards import RewardSet, TrainerState

ADDITION = {
    "_component_": "torchtune_grpo.data.RLDataset",
    "rows": [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(5)],
    "chat": False,
}
WORDS = ADDITION | {"rows": [{"prompt": "spell it", "word": word} for word in ("a", "b", "c")]}


def mixed(**datasets):
    node = {"_component_": "torchtune_grpo.data.MixedDataset", "datasets": datasets}
    return instantiate("dataset", OmegaConf.create(node), Bytes())


def names(dataset, rows):
    return [dataset[row]["columns"]["dataset"] for row in rows]


def test_rows_have_the_columns_of_all_and_the_name_of_theirs():
    dataset = mixed(addition=ADDITION, words=WORDS)
    assert [item["index"] for item in dataset] == [*range(8)] and dataset[-1] == dataset[7]
    assert dataset[4]["columns"] == {"answer": "5", "word": None, "dataset": "addition"}
    assert dataset[5]["columns"] == {"answer": None, "word": "a", "dataset": "words"}
    assert first_prompts(dataset) == {(*b"spell it",), *((*b"%d + 1?" % n,) for n in range(5))}

    def check(items):
        return {i: "odd" if each["index"] == 6 else None for i, each in enumerate(items)}

    dataset.check(check, where="data")
    assert [item["columns"]["word"] for item in dataset][5:] == ["a", "c"]
    assert [item["index"] for item in dataset] == [*range(7)]
    assert dataset.item("2?", 0)["tokens"] == [*b"2?"] and dataset.alike(rows=[{"prompt": "x"}])


def test_an_environment_needs_one_system_prompt():
    assert mixed(addition=ADDITION, words=WORDS).encoder.messages("a")[0]["content"] == "a"
    dataset = mixed(addition=ADDITION, words=WORDS | {"system_prompt": "Spell."})
    with pytest.raises(ValueError, match="an environment needs the same system_prompt in all"):
        _ = dataset.encoder


def test_every_step_has_the_shares_of_the_weights():
    """Whatever the sizes, and each data set in passes of its own."""
    dataset = mixed(addition=ADDITION | {"weight": 3}, words=WORDS)
    sampler = make_sampler(None, dataset, seed=1)
    assert isinstance(sampler, MixedSampler)
    drawn = []
    for _ in range(15):
        rows = sampler.next(4)
        assert sorted(names(dataset, rows)) == ["addition"] * 3 + ["words"]
        sampler.learn(rows, [float(row < 5) for row in rows])
        drawn += rows
    assert sampler.metrics == {"sampler/pass_rate/addition": 1, "sampler/pass_rate/words": 0}
    for part in ([row for row in drawn if row < 5], [row for row in drawn if row >= 5]):
        size = len(set(part))
        passes = [part[i : i + size] for i in range(0, len(part), size)]
        assert all(sorted(each) == sorted(set(part)) for each in passes)
        assert len({*map(tuple, passes)}) > 2


def test_rounding_is_made_up_for():
    rng = random.Random(0)
    for _ in range(4):
        given = {name: ADDITION | {"weight": rng.random()} for name in "abcdef"}
        dataset = mixed(**given)
        sampler, drawn = make_sampler(None, dataset, seed=0), []
        for _ in range(10):
            rows = sampler.next(7)
            sampler.learn(rows, [None] * 7)
            drawn += names(dataset, rows)
        total = sum(node["weight"] for node in given.values())
        for name, node in given.items():
            assert abs(drawn.count(name) - 70 * node["weight"] / total) < 1.5
        assert sampler.metrics == {}


@pytest.mark.parametrize("rest", [0, 1])
def test_rounds_and_resumed_runs_go_on_with_the_same_prompts(tmp_path, rest):
    dataset = mixed(addition=ADDITION | {"weight": 0.3}, words=WORDS | {"weight": 0.7})

    def steps(sampler, count):
        drawn = []
        for _ in range(count):
            rows = sampler.next(3) + sampler.next(2, skip=3)
            assert rows == sampler.next(5)
            sampler.learn(rows, [row % 3 / 2 for row in rows])
            drawn.append((rows, sampler.metrics))
        return drawn

    node = OmegaConf.create({"_component_": "torchtune_grpo.data.MixedSampler", "rest": rest})
    sampler = make_sampler(node, dataset, seed=4)
    steps(sampler, 3)
    torch.save(sampler.state_dict(), tmp_path / "state.pt")
    resumed = make_sampler(node, dataset, seed=4)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert steps(resumed, 20) == steps(sampler, 20)
    assert ("sampler/resting" in sampler.metrics) == bool(rest)
    other = make_sampler(None, dataset, seed=5)
    assert other.next(5) != make_sampler(None, dataset, seed=4).next(5)


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ({}, r"^dataset\.datasets: there is none; give components by name"),
        ({"a": {}}, r"^dataset\.datasets\.a: has no _component_"),
        ({"a": ADDITION | {"weight": 0}}, r"^dataset\.datasets\.a\.weight=0: give a number above"),
        ({"a": ADDITION | {"weight": {1: 1}}}, r"\.a\.weight={1: 1}: give a number above 0"),
        ({"a": ADDITION | {"num_samples": "x"}}, r"^dataset\.datasets\.a\.num_samples='x': should"),
        ({"a": ADDITION | {"rows": []}}, r"^dataset\.datasets\.a\.rows: there are no rows"),
        ({"a": ADDITION, "b": WORDS | {"prefill": "<"}}, r"datasets\.b: has prefill='<', chat=Fa"),
        ({"a": ADDITION | {"columns": {"dataset": "answer"}}}, "names are the column 'dataset', w"),
    ],
)
def test_what_cannot_be_mixed_is_named(datasets, message):
    with pytest.raises(ValueError, match=message):
        mixed(**datasets)


MATH, CODE = (
    {"_component_": f"torchtune_grpo.rewards.{name}"}
    for name in ("math_correctness_reward", "CodeReward")
)
SHORT = {"_component_": "torchtune_grpo.rewards.OverlongPenalty", "max_length": 9, "cache": 9}


async def waits(prompts, completions, **columns):
    return [10.0 * len(text) for text in completions]


def texts(prompts, completions, log_extra, **columns):
    log_extra("text", completions)
    return [float(len(text)) for text in completions]


def never(prompts, completions, **columns):
    pytest.fail("it has no row")


@pytest.mark.slow
def test_each_data_set_has_its_own_reward(caplog):
    """Rows that its reward cannot score are left out, by what is in them and by trial."""
    sums = [{"prompt": "1+1?", "answer": gold} for gold in ("2", "two", "4")]
    test = "def check(f):\n    assert f(1) == 2"
    tests = [{"prompt": "add 1", "test": t, "entry_point": "f"} for t in (test, "pass", test)]
    free = WORDS | {"rows": WORDS["rows"][:1]}
    dataset = mixed(sums=ADDITION | {"rows": sums}, code=WORDS | {"rows": tests}, free=free)
    rewards = RewardSet.from_config([only(MATH, "sums"), only(CODE, "code")])
    with caplog.at_level("INFO"):
        rewards.check_data(dataset, key="dataset")
    assert rewards.decider.is_known and rewards.names == ["right"]
    assert names(dataset, range(5)) == ["sums", "sums", "code", "code", "free"]
    left_out = [text for text in caplog.messages if "left out" in text]
    assert "dataset.datasets.sums: 1 of 3" in left_out[0] and "code: 1 of 3" in left_out[1]
    batch = collate_prompts([*dataset])
    right = "```python\ndef f(x):\n    return x + 1\n```"
    scores = rewards(
        prompts=batch.prompts,
        completions=["So it is 2.", "5", right, "no", right],
        columns=batch.columns,
        trainer_state=TrainerState(0, max_steps=1),
    )
    rewards.close()
    assert [*map(str, scores.total.tolist())] == ["1.0", "0.0", "1.0", "0.0", "nan"]
    why = scores.extra["why"]
    assert why[:2] == [None] * 2 and why[3] and why[4] is None


def only(node, dataset, **more):
    return {**node, "name": "right", "only": {"dataset": dataset}, **more}


def short(dataset):
    return only(SHORT, dataset, name="short", weight=1.5)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([only(MATH, "words")], "reward 'right' needs the column 'answer', but dataset has"),
        ([only(MATH, "sum")], r"'right' has only={'dataset': 'sum'}, but no row of dataset has"),
        ([{**MATH, "only": {"datset": "sums"}}], "only={'datset': 'sums'}, .* you mean dataset?"),
        ([only(MATH, "sums"), only(MATH, "words", weight=2)], r"rewards\[1\].name='right': used"),
        ([only(MATH, "sums"), only(CODE, "sums")], r"rewards\[1\].name='right': used twice; give"),
        ([only(MATH, "sums"), {**MATH, "name": "right"}], r"rewards\[1\].name='right': used twice"),
        ([only(MATH, ["sums", "words"]), only(CODE, ["words"])], "'right': used twice"),
        ([only(MATH, "sums"), short("sums")], "rewards: together short 1.5 can outweigh what ma"),
        ([only(MATH, ["sums", "words"]), short("sums")], "rewards: together short 1.5 can outwe"),
    ],
)
def test_a_reward_that_scores_no_row_or_the_rows_of_another_is_named(nodes, message):
    dataset = mixed(sums=ADDITION, words=WORDS)
    with pytest.raises(ValueError, match=message):
        RewardSet.from_config(nodes).check_data(dataset, key="dataset")


def test_shaping_outweighs_nothing_where_it_does_not_score():
    RewardSet.from_config([only(MATH, "sums"), short("words")])


def test_an_async_reward_and_one_without_rows_score_their_own():
    """Real runs do so with an isolated one: test_mixed_data.py."""
    nodes = [
        {"_component_": f"{__name__}.waits", "only": {"dataset": ["a", "b"]}, "name": "one"},
        {"_component_": f"{__name__}.texts", "only": {"dataset": "c"}, "name": "one"},
        {"_component_": f"{__name__}.never", "only": {"dataset": "d"}},
    ]
    rewards = RewardSet.from_config(nodes)
    assert rewards.names == ["one", "never_d"]
    scores = rewards(
        prompts=["?"] * 4,
        completions=["1", "22", "333", "4444"],
        columns={"dataset": ["c", "a", "c", "b"]},
        trainer_state=TrainerState(0, max_steps=1),
    )
    assert scores.of("one").tolist() == [1, 20, 3, 40] and scores.of("never_d").isnan().all()
    assert scores.extra == {"text": ["1", None, "333", None]}
