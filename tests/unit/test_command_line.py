"""Overrides on the command line change a config as written, and reach into lists."""

from argparse import Namespace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from torchtune_grpo.cli.commands import config_name, named_config
from torchtune_grpo.cli.prompts import as_yaml
from torchtune_grpo.config.command_line import load_config, set_key
from torchtune_grpo.config.text import check_writable, override_without_secrets

TEXT = """
output_dir: out
seed: 0
model: {_component_: my.model, rank: 4, nested: {_component_: my.part}}
rewards:
- {_component_: my.reward, weight: 1.0}
- {_component_: my.other}
checkpoint_files: {max_filename: "00002"}
eval_dataset: {_component_: my.data}
log_dir: ${output_dir}/logs
"""
CHANGES = [
    ("seed=5", "seed", 5),
    ("seed=", "seed", None),
    ("seed='5'", "seed", "5"),
    ("output_dir=a=b", "output_dir", "a=b"),
    ("output_dir=new", "log_dir", "new/logs"),
    ("model=your.model", "model._component_", "your.model"),
    ("model=your.model", "model.rank", 4),
    ("eval_dataset=None", "eval_dataset", None),
    ("rewards.0.weight=0.5", "rewards.0.weight", 0.5),
    ("rewards[1].weight=0.5", "rewards.1.weight", 0.5),
    ("sampling.top_k=5", "sampling.top_k", 5),
    ("output_dir=/a/b #1", "output_dir", "/a/b #1"),
    ("output_dir=in words: a b", "output_dir", "in words: a b"),
    ("model.prefill=#### ", "model.prefill", "#### "),
    ("eval_dataset.columns={a: b}", "eval_dataset.columns.a", "b"),
    ("checkpoint_files.max_filename=00004", "checkpoint_files.max_filename", "00004"),
]
REFUSED = [
    ("seed", "write seed=value"),
    ("--seed=5", "write seed=5, "),
    ("~sed", "there is no key sed"),
    ("rewards.7.weight=1", "rewards has only rewards.0, rewards.1"),
    ("rewards.right.weight=1", "rewards has only rewards.0, rewards.1"),
    ("seed=[1,", "flow node"),
    (
        "model.form=[Q] {x} [/Q]",
        """; a text that is not YAML needs quotes of its own: 'model.form""",
    ),
]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(TEXT)
    return str(path)


@pytest.mark.parametrize(("override", "key", "value"), CHANGES, ids=lambda x: str(x))
def test_an_override_sets_a_key(config, override, key, value):
    cfg = load_config(config, [override])
    assert OmegaConf.select(cfg, key) == value


def test_a_date_that_is_none_is_a_text_in_the_record():
    assert override_without_secrets("output_dir=2024-13-01") == "output_dir=2024-13-01"


def test_a_tilde_removes_a_key_or_an_item(config):
    cfg = load_config(config, ["~eval_dataset", "~rewards.0", "~model.rank"])
    assert "eval_dataset" not in cfg and "rank" not in cfg.model
    assert [reward._component_ for reward in cfg.rewards] == ["my.other"]


def test_a_config_starts_from_another(config, tmp_path):
    """Nodes are merged; another component starts without the arguments of the base's.

    Of several overrides of a key the last wins.
    """
    child = tmp_path / "child.yaml"
    child.write_text("base_config: my.yaml\nmodel: {rank: 8}\neval_dataset: {_component_: a.b}\n")
    cfg = load_config(str(child), ["seed=1", "seed=3"])
    assert (cfg.model._component_, cfg.model.rank, cfg.seed) == ("my.model", 8, 3)
    assert cfg.log_dir == "out/logs" and "base_config" not in cfg
    child.write_text("base_config: my.yaml\nmodel: {_component_: other.model}\n")
    assert load_config(str(child)).model == {"_component_": "other.model"}
    for base, said in (("none", "base_config=none.yaml: "), ("child", ".* starts from itself")):
        child.write_text(f"base_config: {base}.yaml\n")
        with pytest.raises(ValueError, match=said):
            load_config(str(child))


def test_the_path_of_a_config_may_begin_with_the_users_home(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "child.yaml").write_text("base_config: ~/my.yaml\n")
    assert load_config("~/child.yaml").output_dir == "out"


def test_the_folder_of_a_run_names_its_config(tmp_path, monkeypatch):
    """By any name; a folder that a failed run has left does not hide the shipped config."""
    monkeypatch.chdir(tmp_path)
    for name in ("7", "on", "a # b", "tiny_guess_grpo"):
        Path(name).mkdir()
        (Path(name) / "torchtune_config.yaml").write_text("output_dir: x\nseed: 3\n")
        cfg = named_config(Namespace(run=name, overrides=["seed=4"]))
        assert cfg == {"output_dir": name, "seed": 4}
    Path("tiny_guess_grpo/torchtune_config.yaml").unlink()
    cfg = named_config(Namespace(run="tiny_guess_grpo", overrides=[]))
    assert cfg == load_config("tiny_guess_grpo")
    # What `torchtune-grpo prompts` writes can be read, whatever the path.
    base = {"base_config": str(Path(config_name("a # b")).resolve())}
    Path("best.yaml").write_text(as_yaml(base, has_held_out=False))
    assert load_config("best.yaml").seed == 3
    Path("none").mkdir()
    with pytest.raises(ValueError, match="none: no run, as it has no torchtune_config.yaml"):
        named_config(Namespace(run="none", overrides=[]))


def test_two_ranks_try_at_once_whether_a_file_can_be_written(tmp_path, monkeypatch):
    """The other one has deleted what both have written for trial."""
    monkeypatch.setattr(Path, "touch", lambda path: None)
    check_writable("--output", tmp_path / "new.json")


def test_another_component_drops_what_it_does_not_take_and_says_so(tmp_path, caplog):
    """A mapping with another component replaces the node; one with the same changes it."""
    file = tmp_path / "my.yaml"
    file.write_text("optimizer: {_component_: torch.optim.AdamW, lr: 0.1, betas: [0.5, 0.9]}\n")
    cfg = load_config(str(file), ["optimizer=torch.optim.SGD"])
    assert cfg.optimizer == {"_component_": "torch.optim.SGD", "lr": 0.1}
    assert caplog.messages == [
        "optimizer=torch.optim.SGD: does not take betas, which the config had set."
    ]
    node = {"_component_": "torch.optim.SGD", "momentum": 0.9}
    set_key(cfg := load_config(str(file)), "optimizer", node)
    assert cfg.optimizer == node
    node = {"_component_": "torch.optim.AdamW", "lr": 0.2}
    set_key(cfg := load_config(str(file)), "optimizer", node)
    assert cfg.optimizer == {**node, "betas": [0.5, 0.9]}


def test_an_environment_keeps_what_stands_beside_its_component(config):
    """In whatever order, and where the file has its path alone."""
    changes = ["environment=my.Game", "environment.max_turns=3"]
    for overrides in (changes, changes[::-1]):
        cfg = load_config(config, overrides)
        assert cfg.environment == {"_component_": "my.Game", "max_turns": 3}
    with open(config, "a") as file:
        file.write("environment: my.Game\n")
    cfg = load_config(config, ["environment.form=inline", "environment=collections.Counter"])
    assert cfg.environment == {"_component_": "collections.Counter", "form": "inline"}


@pytest.mark.parametrize(("override", "remedy"), REFUSED, ids=lambda x: x)
def test_what_is_no_override_is_named(config, override, remedy):
    with pytest.raises(ValueError) as error:
        load_config(config, [override])
    assert str(error.value).startswith(f"{override}: ") and remedy in str(error.value)


def test_what_is_no_config_is_named(tmp_path):
    with pytest.raises(ValueError, match="^none: no such file, run or shipped config"):
        load_config("none")
    for text in ("a: [1", "a: 1\na: 2", "- 1\n", "a: \x00"):
        path = tmp_path / "broken.yaml"
        path.write_text(text)
        with pytest.raises(ValueError, match=".*broken.yaml: (not YAML|holds no keys)"):
            load_config(str(path))
