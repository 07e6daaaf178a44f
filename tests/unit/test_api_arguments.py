"""What is given to GRPO as Python values -> keys, nodes and files; and what is said of mistakes."""

import linecache
import math
import re
import sys
from functools import partial

import datasets
import numpy
import pytest
import torch
from omegaconf import OmegaConf

from torchtune_grpo import GRPO
from torchtune_grpo._api_config import RLDATASET, Arguments, data_node, rows_of, write_rows
from torchtune_grpo._api_rewards import GivenReward, dotpath, own_folder, reward_nodes
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.errors import ConfigError, Problems
from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.rewards import CodeReward, math_correctness_reward
from torchtune_grpo.rollout import roll_out

LIMIT = 3


@pytest.fixture
def arguments():
    return Arguments(load_config("tiny_arithmetic_grpo"))


def names_a_table(mode, *, mode_names=()):
    """Its node's keys can be misread."""


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"num_steps": 7}, "num_steps", 7),
        ({"loss_kl_coeff": 0.5}, "loss.kl_coeff", 0.5),
        ({"loss_aggregation": "dapo"}, "loss.aggregation", "dapo"),  # not in the node before
        ({"loss": {"kl_coeff": 0.5}}, "loss.kl_coeff", 0.5),
        ({"optimizer": {"lr": 0.5}}, "optimizer.weight_decay", 0.0),  # stays
        ({"loss": GRPOLoss}, "loss.kl_coeff", 0.0),
        ({"optimizer": torch.optim.SGD}, "optimizer._component_", "torch.optim.SGD"),
        ({"optimizer": "torch.optim.SGD"}, "optimizer.lr", 5e-4),
        ({"optimizer": {"_component_": "torch.optim.SGD"}}, "optimizer.lr", None),
        ({"lr_scheduler": None}, "lr_scheduler", None),
        ({"lr_scheduler_num_warmup_steps": 2}, "lr_scheduler.num_warmup_steps", 2),
        ({"sampling_top_k": 5}, "sampling.top_k", 5),
        (
            {"objective_sampling_correction": "token_mask"},
            "objective.sampling_correction",
            "token_mask",
        ),
        ({"eval_dataset_prefill": "x"}, "eval_dataset.prefill", "x"),
        ({"eval_dataset_sep": ";"}, "eval_dataset.sep", ";"),  # for what takes any key
        ({"dataset_split": "a", "dataset": "torchtune_grpo.data.RLDataset"}, "dataset.split", "a"),
        ({"optimizer_lr": numpy.float32(0.5)}, "optimizer.lr", 0.5),
        ({"optimizer_lr": numpy.float64(0.5)}, "optimizer.lr", 0.5),
        ({"optimizer_betas": numpy.array([0.5, 0.9])}, "optimizer.betas", [0.5, 0.9]),
    ],
)
def test_a_name_is_a_key_of_the_config(arguments, given, key, value):
    if "eval_dataset_sep" in given:
        arguments.set_keys({"eval_dataset": "torchtune_grpo.data.RLDataset"})
    arguments.set_keys(given)
    assert not arguments.problems
    assert OmegaConf.select(arguments.cfg, key) == value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nm_steps": 3}, "nm_steps: unknown key. Did you mean num_steps?"),
        ({"loss_kl_coef": 0}, "loss_kl_coef: unknown key. Did you mean loss_kl_coeff?"),
        ({"optimzer_lr": 0}, "optimzer_lr: unknown key. Did you mean optimizer_lr?"),
        ({"eval_datas": 0}, "eval_datas: unknown key. Did you mean eval_data?"),
        ({"device": object()}, "device=<object object"),
        ({"optimizer": lambda p: p}, "move it into a module"),
    ],
)
def test_a_name_that_is_none_is_refused(arguments, given, said):
    arguments.set_keys(given)
    assert len(arguments.problems) == 1 and said in arguments.problems[0]


def test_problems_are_told_with_the_names_that_were_given(arguments):
    node = {"_component_": "torchtune_grpo.data.RLDataset", "source": "x"}
    for _ in range(2):
        arguments.put("dataset", node, written="data", whole=True)
        assert arguments.cfg.dataset == node  # all of what was there is gone
        arguments.set_keys({"dataset_prefill": "<think>"})
    arguments.set_keys({"loss_kl_coeff": -1, "dataset_split": "a", "num_steps": 0})
    problems = {
        "loss.kl_coeff=-1: give 0 or more.": "loss_kl_coeff=-1: give 0 or more.",
        "loss.epsilon_low=2: less.": "loss.epsilon_low=2: less.",
        "dataset.split='a': is not there.": "dataset_split='a': is not there.",
        "dataset: row 1": "data: row 1",
        "dataset.source='x': nothing": "data.source='x': nothing",
        "num_steps=0: give more": "num_steps=0: give more",
    }
    assert arguments.told(problems) == list(problems.values())


def test_data_is_a_node_or_rows(tmp_path):
    rows = [{"prompt": "a", "answer": 1.5}, {"prompt": "b", "answer": math.inf}]
    held = datasets.Dataset.from_list(rows)
    for given in (rows, tuple(rows), held, held.select([1, 0]).select([1, 0])):
        node, found = data_node(given, "data")
        assert node == {"_component_": RLDATASET} and [*map(dict, found)] == rows
    (tmp_path / "rows.jsonl").write_text("{}")
    for given in (str(tmp_path / "rows.jsonl"), tmp_path / "rows.jsonl", "some/name"):
        assert data_node(given, "data") == ({"_component_": RLDATASET, "source": str(given)}, None)
    own = {"_component_": "my.data", "n": 3}
    assert data_node(own, "data") == (own, None)
    for wrong, said in (
        ([], "data: holds no rows"),
        ([{"a": 1}, {"b": 1}], "row 1 is {'b': 1}; give dicts with the same keys"),
        (["a"], "row 0 is 'a'; give dicts"),
        ([{1: "a"}], "row 0 is {1: 'a'}; give dicts with the same keys, all of them texts"),
        ({"prompt": ["a"]}, "is no data; give a list of dicts"),
        (datasets.DatasetDict(train=held), "give one of its splits, train"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            rows_of(wrong, "data")
    for answer, said in (("x", ".*'x'"), ("\ud83d", ".*surrogates")):
        with pytest.raises(ValueError, match=f"data: the column 'answer': {said}"):
            write_rows(
                [{"answer": a} for a in (rows[0]["answer"] if answer == "x" else "y", answer)],
                tmp_path / "x.parquet",
                "data",
            )
    with pytest.raises(ValueError, match="data: .*'answer'"):
        write_rows([{"prompt": "b", "answer": {}}], tmp_path / "x.parquet", "data")


def test_what_can_be_imported_is_named_by_its_shortest_dotpath():
    assert dotpath(math_correctness_reward) == "torchtune_grpo.rewards.math_correctness_reward"
    assert dotpath(roll_out) == "torchtune_grpo.rollout.roll_out"
    assert dotpath(names_a_table) == f"{__name__}.names_a_table"
    for hidden in (lambda: 0, test_a_name_is_a_key_of_the_config.__get__(3), CodeReward(), 3):
        assert dotpath(hidden) is None


def cell(source, name="reward"):
    """A function as a notebook's cell defines one."""
    linecache.cache["<cell>"] = (len(source), None, source.splitlines(True), "<cell>")
    space = {"__name__": "__main__", "math": math, "np": numpy, "sqrt": math.sqrt, "LIMIT": 3}
    exec(compile(source, "<cell>", "exec"), space)
    return space[name]


def test_rewards_are_nodes_and_some_are_ours_alone():
    def around(prompts, completions, **columns):
        return [LIMIT for _ in completions]

    own = cell("def reward(prompts, completions, **columns): return [0.0] * len(completions)")
    problems = Problems()
    nodes, given = reward_nodes(
        [
            math_correctness_reward,
            (own, 0.5),
            "my.reward",
            {"_component_": CodeReward, "timeout": 3},
            partial(math_correctness_reward, x=1),
            lambda prompts, completions, **columns: [],
            around,
        ],
        problems,
    )
    assert not problems
    path = "torchtune_grpo.rewards.math_correctness_reward"
    assert nodes == [
        {"_component_": path},
        {"_component_": f"{given[0].module}.reward", "weight": 0.5},
        {"_component_": "my.reward"},
        {"_component_": "torchtune_grpo.rewards.CodeReward", "timeout": 3},
        {"_component_": path, "x": 1},
        {"_component_": f"{given[1].module}.reward"},
        {"_component_": f"{given[2].module}.around"},
    ]
    assert len({each.module for each in given}) == 3
    assert [each.key for each in given] == ["rewards[1]", "rewards[5]", "rewards[6]"]
    apart = [{"_component_": thing, "isolation": "process"} for thing in (own, around)]
    reward_nodes([3, {"weight": 1}, *apart], problems)
    assert [problem[:10] for problem in problems] == ["rewards[0]", "rewards[1]", "rewards[3]"]
    reward_nodes(own, problems)
    assert "is no such list" in problems[-1]


def test_one_text_has_one_module_in_every_run(tmp_path):
    known = {}
    for number, source in enumerate((WHOLE, WHOLE, WHOLE.replace("2", "3"))):
        given = GivenReward.of(f"rewards[{number}]", cell(source))
        known.setdefault(given.module, []).append(number)
    assert [*known.values()] == [[0, 1], [2]]


def test_a_module_beside_the_script_is_not_where_tune_looks(tmp_path, monkeypatch):
    (tmp_path / "mine.py").touch()
    main = sys.modules["__main__"]  # of a worker of xdist, which has no file
    monkeypatch.setattr(main, "__file__", str(tmp_path / "script.py"), raising=False)
    assert own_folder("mine.reward") == tmp_path and own_folder("other.reward") is None
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "beside.py").touch()
    config = tmp_path / "conf" / "my.yaml"
    assert own_folder("beside.reward", config) == tmp_path / "conf"
    monkeypatch.chdir(tmp_path)
    assert own_folder("mine.reward", config) is None


# A comprehension is a function of its own in Python 3.11, whose names are not the function's.
WHOLE = '''
def reward(prompts: list[str], completions, scale=math.pi, **columns):
    """Of its own."""
    def inner(text):
        return np.float64(sqrt(len(text)) * 2)
    return [float(inner(c) * scale) for c in completions]
'''


def test_a_reward_that_needs_only_imports_is_written_as_a_module(tmp_path, monkeypatch):
    for source in (WHOLE, "async " + WHOLE.strip()):
        reward = cell(source)
        given = GivenReward.of("rewards[0]", reward)
        assert given.write(tmp_path) is None
        text = (tmp_path / f"{given.module}.py").read_text()
        assert "import math\nimport numpy as np\nfrom math import sqrt\n" in text
        space = {}
        exec(text, space)
        if not source.startswith("async"):
            assert space["reward"](None, ["abcd"]) == reward(None, ["abcd"]) == [4 * math.pi]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def reward(**k): return [len(c) > LIMIT for c in k]", "uses LIMIT"),
        ("def reward(x=LIMIT, **k): return []", "uses LIMIT"),
        ("def reward(**k): return missing", "uses missing, which is not defined"),
        ("reward = lambda **k: []", "has no name"),
        (
            "def make(a):\n    def reward(**k): return [a]\n    return reward\nreward = make(1)",
            "around",
        ),
        ("class R:\n    def __call__(self, **k): return []\nreward = R()", "is no function"),
    ],
)
def test_what_else_a_reward_needs_is_said(tmp_path, source, why):
    said = GivenReward.of("rewards[2]", cell(source)).write(tmp_path)
    assert said.startswith("rewards[2] (") and why in said and not list(tmp_path.iterdir())


def test_data_that_is_none_is_told_without_reading_the_configs(tmp_path):
    with pytest.raises(ConfigError) as error:
        GRPO(model_dir=tmp_path, data=5, rewards=[len], output_dir=tmp_path / "out")
    told = [each.partition(";")[0] for each in error.value.problems]
    assert told[0] == "data=5: is no data" and not any("openai/gsm8k" in each for each in told)
    assert any(each.startswith("model_dir=") for each in told)
