"""Engines: a user's own in the real recipe, what one declares, and where its arguments stand."""

import math
import sys

import pytest
import torch
from policies import build_policy
from runs import SGD, run_tiny, steps_of

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.text import ConfigError
from torchtune_grpo.rollout.engine import check_engine, make_engine
from torchtune_grpo.rollout.request import EngineContext
from torchtune_grpo.run import Run
from torchtune_grpo.training.checks import check_prompts

# Beside uniform samples it writes a token of its own, whose log-probs nobody may look at.
ENGINE = """
import torch
from torchtune_grpo.rollout import Capabilities, RolloutEngine
from torchtune_grpo.rollout.vllm import VLLMEngine
from torchtune_grpo.trajectory import Samples


class Uniform(RolloutEngine):
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


class Short(Uniform):
    @classmethod
    def capabilities(cls, *, length):
        return Capabilities(longest_row=length, correction="sequence_mask", reproducible=True)

    @classmethod
    def check(cls, cfg):
        if cfg.temperature != 1:
            raise ValueError("temperature: this engine samples uniformly; set it to 1.")


class MyVLLM(VLLMEngine):
    pass


def silent(context):
    return context
"""
REWARD = """
def reward_letters(prompts, completions, **columns):
    return [float(sum(map(ord, c)) % 7) for c in completions]
"""
LORA, TINY = "llama3_2_1B_lora_grpo", "tiny_arithmetic_grpo"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Engines of a user's own can be imported."""
    (tmp_path / "my_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_engine", raising=False)


def settings_of(*options):
    return Run(load_config(TINY, options)).cfg


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
        ("my_engine.Absent", "rollout.engine._component_=my_engine.Absent: .* has no 'Absent'"),
        ("{_component_: my_engine.Uniform, len: 2}", "rollout.engine.len=2: .*It takes context, l"),
        ("my_engine.Short", "rollout.engine.length: missing; give rollout.engine.length=<value>"),
        ("my_engine.silent", "rollout.engine=my_engine.silent: not an engine; .*RolloutEngine"),
    ],
)
def test_what_is_no_engine_is_named(own, node, said):
    with pytest.raises(ConfigError, match=said):
        check_engine(Run(load_config(TINY, [f"rollout.engine={node}"])).cfg)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("rollout.engine=my_engine.Uniform tools=[my.f]", "^rollout.engine=my_engine.U.*one turn"),
        (
            "rollout.engine=my_engine.Uniform sampling.min_p=0.1",
            "^sampling.min_p=0.1: .*no filters",
        ),
        ("rollout.engine=my_engine.Uniform evaluation.sampling.top_k=2", "^evaluation.sampling.t"),
        ("rollout.engine=my_engine.Short temperature=0.5", "^temperature: this engine samples un"),
    ],
)
def test_what_an_engine_has_not_declared_is_refused(own, options, said):
    options = [*options.split(), "rollout.engine.length=9"]
    with pytest.raises(ConfigError, match=said):
        check_engine(read_config(load_config(TINY, options)))


@pytest.mark.parametrize("chosen", ["my_engine.Short", "vllm", "my_engine.MyVLLM"])
def test_what_an_engine_wants_holds_for_everybodys(own, chosen):
    limit = "length" if chosen == "my_engine.Short" else "max_model_len"
    wanted = "sequence_mask" if limit == "length" else "token_truncate"
    named = [f"rollout.engine={chosen}", f"rollout.engine.{limit}=64"]
    cfg = settings_of(*named, "objective.correction_cap=3")
    assert cfg.objective.sampling_correction == wanted
    for said in (None, "token_mask"):
        correction = f"objective.sampling_correction={'null' if said is None else said}"
        assert settings_of(*named, correction).objective.sampling_correction == said
    for algorithm, expected in (("dapo", wanted), ("dppo", "old_logprobs")):
        of_paper = settings_of(*named, f"algorithm={algorithm}")
        assert of_paper.objective.sampling_correction == expected
    assert settings_of().objective.sampling_correction is None
    with pytest.raises(ValueError, match="most 64 tokens of .* dataset .* 78; raise the engine"):
        check_prompts(cfg, "dataset", [[1] * 30], model=build_policy())


def test_a_correction_that_an_engine_wants_has_an_effect(own, caplog):
    """So the keys that go with it are not reported as without one."""
    settings_of("rollout.engine=my_engine.MyVLLM", "objective.correction_cap=3")
    assert "correction_cap" not in caplog.text


@pytest.mark.parametrize("before", ["null", "native", "{_component_: native}", "{}"])
def test_an_engines_arguments_can_be_set_whatever_the_config_says(before, tmp_path):
    written = "" if before == "null" else f"rollout: {{engine: {before}}}"
    (tmp_path / "my.yaml").write_text(f"base_config: {TINY}\n{written}")
    options = ["rollout.engine.cuda_graphs=never", "rollout.max_rows=3"]
    cfg = load_config(str(tmp_path / "my.yaml"), options)
    rollout = read_config(cfg).rollout
    engine = make_engine(EngineContext(build_policy(), rollout, torch.device("cpu")))
    assert type(engine).__name__ == "NativeEngine" and engine._settings.max_rows == 3
    assert rollout.engine.cuda_graphs == "never"
    assert read_config(cfg).replace().rollout == rollout  # read again, it is the same
