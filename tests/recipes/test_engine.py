"""An engine of a user's own, named in the config, runs through the real recipe."""

import math
import sys

import pytest
import torch
from policies import build_policy
from runs import SGD, run_tiny, steps_of

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.rollout.engine import make_engine
from torchtune_grpo.rollout.request import EngineContext

# Beside uniform samples it writes a token of its own, whose log-probs nobody may look at.
ENGINE = """
import torch
from torchtune_grpo.trajectory import Samples


class Uniform:
    is_reproducible = False

    def __init__(self, context, *, length):
        self.vocab, self.length = context.model.tok_embeddings.num_embeddings, length

    def generate(self, request):
        shape = request.num_rows, self.length
        logprobs = torch.full(shape, -torch.tensor(self.vocab).log().item())
        logprobs[:, 1], sampled = torch.nan, torch.ones(shape, dtype=torch.bool)
        sampled[:, 1] = False
        return Samples(
            responses=torch.randint(200, shape),
            lengths=torch.full(shape[:1], self.length),
            truncated=torch.ones(shape[:1], dtype=torch.bool),
            sampled=sampled,
            sampler_logprobs=logprobs,
            behaviour_logprobs=logprobs,
        )


def silent(context):
    return context
"""
REWARD = """
def reward_letters(prompts, completions, **columns):
    return [float(sum(map(ord, c)) % 7) for c in completions]
"""
LORA = "llama3_2_1B_lora_grpo"


def test_a_run_trains_on_what_another_engine_sampled_and_on_nothing_else(tmp_path):
    (tmp_path / "my_engine.py").write_text(ENGINE)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    options = ["rollout.engine={_component_: my_engine.Uniform, length: 5}"]
    options += ["rewards=[{_component_: my_rewards.reward_letters}]", *SGD]
    result = run_tiny(LORA, tmp_path, *options, "objective.sampling_correction=token_mask")
    steps = steps_of(tmp_path / "out")
    assert len(steps) == 2
    for step in steps:
        # Of a response's five tokens, four were sampled.
        assert step["completions/mean_length"] == step["completions/min_length"] == 4
        assert all(map(math.isfinite, step.values())) and step["grad_norm"] > 0
    assert "my_engine.Uniform: its samples are not reproducible" in result.err


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("nativ", "rollout.engine='nativ': give native, torchtune, vllm or a component"),
        ("my_engine.Absent", "rollout.engine._component_=my_engine.Absent: cannot be imported"),
        ("{_component_: my_engine.Uniform, len: 2}", "rollout.engine.len=2: .*It takes context, l"),
        ("my_engine.silent", "rollout.engine=my_engine.silent: an engine has generate"),
    ],
)
def test_what_is_no_engine_is_named(tmp_path, monkeypatch, node, said):
    (tmp_path / "my_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_engine", raising=False)
    with pytest.raises(ValueError, match=said):
        settings = read_config(load_config("tiny_arithmetic_grpo", [f"rollout.engine={node}"]))
        make_engine(EngineContext(build_policy(), settings.rollout, torch.device("cpu")))
