"""What the vLLM engine refuses or sets in a config is known before any weights are read."""

import math
import random
import re
import sys
from types import ModuleType
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hf_models import hf_folder
from policies import build_policy

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import RolloutConfig, SamplingParams
from torchtune_grpo.config.text import ConfigError
from torchtune_grpo.models import hf_model, lora_hf_model
from torchtune_grpo.rollout import vllm
from torchtune_grpo.rollout.engine import check_engine
from torchtune_grpo.rollout.request import EngineContext, RolloutRequest
from torchtune_grpo.run import Run


def config(*options):
    return read_config(load_config("tiny_arithmetic_grpo", ["rollout.engine=vllm", *options]))


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(vllm, "_version", lambda: "0.32.0")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("sampling.top_k=5", "sampling.top_k=5: rollout.engine=vllm has no filters and penalties"),
        ("sampling.repetition_penalty=1.1", "sampling.repetition_penalty=1.1: "),
        ("sampling.suppressed_tokens=[3]", "sampling.suppressed_tokens=(3,): "),
        ("evaluation.sampling.top_p=0.9", "evaluation.sampling.top_p=0.9: "),
        ("temperature=0.001", "temperature=0.001: rollout.engine=vllm takes 0.01 to 2.0"),
        ("evaluation.sampling.temperature=3.0", "evaluation.sampling.temperature=3.0: "),
    ],
)
def test_each_key_that_it_cannot_follow_is_named(installed, option, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_engine(config(option))


def test_a_model_that_it_would_compute_otherwise_is_refused(installed, tmp_path):
    folder = hf_folder("qwen3_untied", tmp_path)
    with pytest.raises(ConfigError, match="says attention_bias=True: .*set rollout.engine to nat"):
        check_engine(config(f"model_dir={folder}"))


def test_what_changes_nothing_is_taken_and_another_version_is_told(installed, monkeypatch, caplog):
    options = ["sampling.top_p=1.0", "evaluation.sampling.min_p=0", "sampling.stop_strings=[x]"]
    check_engine(config(*options))
    assert not caplog.text
    monkeypatch.setattr(vllm, "_version", lambda: "0.34.0")
    check_engine(config())
    assert "tested with vLLM 0.32, not 0.34.0" in caplog.text


def test_a_missing_vllm_is_one_line_before_a_model_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm, "_version", lambda: None)
    options = ["rollout.engine=vllm", f"output_dir={tmp_path / 'out'}"]
    run = Run(load_config("tiny_arithmetic_grpo", options))
    problems, _ = run.check()
    assert len(problems) == 1 and "not installed; pip install 'vllm" in problems[0]
    with pytest.raises(ConfigError, match="not installed; pip install 'vllm"):
        run.prepare_model()
    assert not (tmp_path / "out").exists()


def test_keys_and_values_fill_the_room_at_most_and_hold_one_row():
    model = build_policy()  # 2 layers, 2 heads of 8 numbers with keys and values, in float32
    of_token, spare = 2 * 2 * 2 * 8 * 4, 2 * vllm.BLOCK
    for room, expected in (
        (math.inf, 10 * (2 * 30 + spare) * of_token),
        (99_999.5, 99_999),
        (-1.0, (128 + spare) * of_token),
    ):
        assert vllm.cache_bytes(model, 10, longest=30, most=128, room=room) == expected


@pytest.mark.parametrize(
    ("dtype", "name", "fits", "fails"),
    [("fp32", "max", 0.009, 0.011), ("bf16", "mean", 0.09, float("nan"))],
)
def test_a_step_whose_logprobs_differ_ends_the_run(dtype, name, fits, fails, tmp_path):
    folder = str(hf_folder("llama3", tmp_path / "model"))
    model = hf_model(folder).to(torch.float32 if dtype == "fp32" else torch.bfloat16)
    context = EngineContext(model, RolloutConfig(), torch.device("cpu"), model_dir=folder)
    engine, key = vllm.VLLMEngine(context), f"sampling/sampling_logp_difference/{name}"
    engine.check_step({})  # nothing was trained on
    engine.check_step({key: fits})
    with pytest.raises(ValueError, match="samples from another policy"):
        engine.check_step({key: fails})


def test_random_numbers_of_rewards_are_left_as_they_were():
    """vLLM seeds all generators with 0 when it starts, which is in the first rollout."""
    before = random.getstate(), np.random.get_state()[1].tolist(), sys.excepthook
    with vllm._contained():
        random.seed(0)
        np.random.seed(0)
        sys.excepthook = print
    assert (random.getstate(), np.random.get_state()[1].tolist(), sys.excepthook) == before


def test_the_deadline_of_a_rollout_begins_after_vllms_start(tmp_path, monkeypatch):
    folder = str(hf_folder("llama3", tmp_path / "model"))
    settings = RolloutConfig(deadline=60.0)
    context = EngineContext(hf_model(folder), settings, torch.device("cpu"), model_dir=folder)
    engine, now, seen = vllm.VLLMEngine(context), [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(engine, "_start", lambda request: now.append(now.pop() + 300.0))
    monkeypatch.setattr(engine, "_bring_weights", lambda: now.append(now.pop() + 300.0))
    monkeypatch.setattr(engine, "_compare", lambda *_: None)

    def sample(request, stop):
        for _ in range(2):
            seen.append(stop())
            now.append(now.pop() + 61.0)
        return [vllm._Row()]

    monkeypatch.setattr(engine, "_sample", sample)
    engine.generate(ONE_ROW)
    assert seen == [False, True]


ONE_ROW = RolloutRequest(
    prompts=[[1]],
    group_size=1,
    params=SamplingParams(temperature=1.0, max_generated_tokens=2),
    stop_tokens=[2],
    keys=torch.tensor([1]),
    vocab_size=48,
)


class SleepingLLM:
    """Notes when it is put to sleep and woken."""

    def __init__(self, notes):
        self.notes, self.sleeps, self.llm_engine = notes, False, self

    def is_sleeping(self):
        return self.sleeps

    def sleep(self, *, level):
        self.sleeps = True
        self.notes.append(f"sleep {level}")

    def wake_up(self):
        self.sleeps = False
        self.notes.append("wake")


@pytest.mark.parametrize("available", [True, False])
def test_sleep_is_asked_for_where_the_platform_has_it(available, tmp_path, monkeypatch):
    """Asked for elsewhere, vLLM does not start."""
    folder = str(hf_folder("llama3", tmp_path / "model"))
    cpu = torch.device("cpu")
    engine = vllm.VLLMEngine(
        EngineContext(hf_model(folder), RolloutConfig(), cpu, model_dir=folder)
    )
    engine._sleeps = True  # as on CUDA
    module, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    module.LLM = Mock()
    platforms.current_platform = Mock(is_sleep_mode_available=lambda: available)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    engine._start(ONE_ROW)
    assert module.LLM.call_args.kwargs["enable_sleep_mode"] is engine._sleeps is available


@pytest.mark.parametrize(("merge", "level"), [("auto", 2), ("never", 1)])
def test_it_sleeps_between_rollouts_on_cuda(merge, level, tmp_path, monkeypatch):
    """Where the weights themselves come only once, sleep has to keep them."""
    folder = str(hf_folder("llama3", tmp_path / "model"))
    model = lora_hf_model(folder, lora_attn_modules=["q_proj"], lora_rank=2, lora_alpha=4)
    context = EngineContext(model, RolloutConfig(), torch.device("cpu"), model_dir=folder)
    engine = vllm.VLLMEngine(context, merge_adapters=merge)
    notes = []
    engine._sleeps, engine._llm, engine._vocab = True, SleepingLLM(notes), 48
    monkeypatch.setattr(engine, "_bring_weights", lambda: notes.append("weights"))
    monkeypatch.setattr(engine, "_compare", lambda *_: None)
    monkeypatch.setattr(engine, "_sample", lambda *_: [vllm._Row()])
    engine.generate(ONE_ROW)
    engine.generate(ONE_ROW)
    assert notes == ["weights", f"sleep {level}", "wake", "weights", f"sleep {level}"]
    monkeypatch.setattr(engine, "_sample", Mock(side_effect=KeyboardInterrupt))
    for _ in range(2):  # an interrupted rollout leaves it awake
        with pytest.raises(KeyboardInterrupt):
            engine.generate(ONE_ROW)
    assert notes[5:] == ["wake", "weights", "weights"]
