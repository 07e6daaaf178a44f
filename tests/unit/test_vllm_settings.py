"""What the vLLM engine refuses or sets in a config is known before any weights are read."""

import math
import os
import random
import re
import sys
from dataclasses import replace
from types import ModuleType
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hf_models import hf_folder
from policies import build_policy
from rollouts import request

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import RolloutConfig
from torchtune_grpo.config.text import ConfigError
from torchtune_grpo.models import hf_model
from torchtune_grpo.rollout.engine import check_engine
from torchtune_grpo.rollout.request import EngineContext
from torchtune_grpo.rollout.vllm import VLLMEngine, process, settings
from torchtune_grpo.rollout.vllm.engine import BLOCK, cache_bytes
from torchtune_grpo.rollout.vllm.guard import Guard
from torchtune_grpo.run import Run
from torchtune_grpo.trajectory import Samples, length_mask


def config(*options):
    return read_config(load_config("tiny_arithmetic_grpo", ["rollout.engine=vllm", *options]))


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(settings, "find_spec", lambda name: name)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("sampling.top_k=5", "sampling.top_k=5: rollout.engine=vllm has no filters and penalties"),
        ("sampling.repetition_penalty=1.1", "sampling.repetition_penalty=1.1: "),
        ("sampling.min_new_tokens=3", "sampling.min_new_tokens=3: "),
        ("evaluation.sampling.top_p=0.9", "evaluation.sampling.top_p=0.9: "),
        ("temperature=0.001", "temperature=0.001: rollout.engine=vllm takes 0.01 to 2.0"),
        ("evaluation.sampling.temperature=3.0", "evaluation.sampling.temperature=3.0: "),
    ],
)
def test_each_key_that_it_cannot_follow_is_named(installed, option, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_engine(config(option))


@pytest.mark.parametrize(
    "name, key", [("qwen3_untied", "attention_bias"), ("ernie4_5", "use_bias")]
)
def test_a_model_that_it_would_compute_otherwise_is_refused(name, key, installed, tmp_path):
    folder = hf_folder(name, tmp_path)
    with pytest.raises(ConfigError, match=f"says {key}=True: .*set rollout.engine to native"):
        check_engine(config(f"model_dir={folder}"))


def test_windows_from_some_layer_on_are_refused_for_qwen(installed, tmp_path):
    windows = dict(sliding_window=8, use_sliding_window=True, max_window_layers=1)
    folder = hf_folder("qwen2", tmp_path / "some", **windows)
    with pytest.raises(ConfigError, match="says max_window_layers=1: .*set rollout.engine to nat"):
        check_engine(config(f"model_dir={folder}"))
    folder = hf_folder("qwen2", tmp_path / "none", **windows | {"max_window_layers": 2})
    check_engine(config(f"model_dir={folder}"))


def test_what_changes_nothing_is_taken(installed, caplog):
    options = ["sampling.top_p=1.0", "evaluation.sampling.min_p=0", "sampling.stop_strings=[x]"]
    check_engine(config(*options))
    assert not caplog.text


def test_a_missing_vllm_is_one_line_before_a_model_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    options = ["rollout.engine=vllm", f"output_dir={tmp_path / 'out'}"]
    run = Run(load_config("tiny_arithmetic_grpo", options))
    problems, _ = run.check()
    assert len(problems) == 1 and "not installed; pip install 'vllm" in problems[0]
    with pytest.raises(ConfigError, match="not installed; pip install 'vllm"):
        run.prepare_model()
    assert not (tmp_path / "out").exists()


def test_a_server_needs_an_address_a_folder_and_no_vllm_here(monkeypatch):
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    node = "rollout.engine={_component_: vllm_server, url: 'http://a:8000'"
    check_engine(config(f"{node}, shared: /tmp/shared}}"))
    with pytest.raises(ConfigError, match="rollout.engine.shared: missing; give"):
        check_engine(config(f"{node}}}"))


def test_keys_and_values_fill_the_room_at_most_and_hold_one_row():
    model = build_policy()  # 2 layers, 2 heads of 8 numbers with keys and values, in float32
    of_token, spare = 2 * 2 * 2 * 8 * 4, 2 * BLOCK
    for room, expected in (
        (math.inf, 10 * (2 * 30 + spare) * of_token),
        (99_999.5, 99_999),
        (-1.0, (128 + spare) * of_token),
    ):
        assert cache_bytes(model, 10, longest=30, most=128, room=room) == expected


@pytest.mark.parametrize(
    ("dtype", "name", "fits", "fails"),
    [("fp32", "max", 0.009, 0.011), ("bf16", "mean", 0.09, float("nan"))],
)
def test_a_step_whose_logprobs_differ_ends_the_run(dtype, name, fits, fails, tmp_path):
    engine = engine_for(tmp_path, torch.float32 if dtype == "fp32" else torch.bfloat16)
    key = f"sampling/sampling_logp_difference/{name}"
    engine.check_step({})  # nothing was trained on
    engine.check_step({key: fits})
    with pytest.raises(ValueError, match="samples from another policy"):
        engine.check_step({key: fails})


def test_the_process_is_left_as_it_was():
    """vLLM seeds all generators with 0 when it starts, which is in the first rollout."""

    def state():
        names = [getattr(at, name) for at, names in process.REPLACED for name in names]
        numbers = (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )
        return names, numbers, dict(os.environ)

    before = state()
    with process.contained():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        os.environ["VLLM_OF_ITS_OWN"] = "1"
        sys.excepthook = torch.accelerator.synchronize = print
    assert state() == before
    with process.contained():  # its next call finds what it has put there
        assert sys.excepthook is torch.accelerator.synchronize is print
    assert state() == before


class EmptyRollout:
    """Stands in for vLLM's rollout and its comparisons with the trainer."""

    def __init__(self, monkeypatch, engine, run=lambda must_stop: None):
        self.run, self.arguments = run, None
        monkeypatch.setattr("torchtune_grpo.rollout.vllm.engine.VLLMRollout", self.begin)
        monkeypatch.setattr(engine, "_compare_weights", lambda: None)
        monkeypatch.setattr(engine._guard, "compare", lambda *_, vocab: None)

    def begin(self, requests, request, **arguments):
        self.arguments = arguments
        return self

    def samples(self, device):
        return None


def test_the_deadline_of_a_rollout_begins_after_vllms_start(tmp_path, monkeypatch):
    engine, now, seen = engine_for(tmp_path, deadline=60.0), [0.0], []
    engine._llm = SleepingLLM([])
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(engine, "_start", lambda request: now.append(now.pop() + 300.0))
    monkeypatch.setattr(engine, "_bring_weights", lambda: now.append(now.pop() + 300.0))

    def run(must_stop):
        for _ in range(2):
            seen.append(must_stop())
            now.append(now.pop() + 61.0)

    rollout = EmptyRollout(monkeypatch, engine, run)
    engine.generate(ONE_ROW)
    assert seen == [False, True]
    assert rollout.arguments["reply_steps"] is None  # time decides, anyway


def engine_for(tmp_path, dtype=torch.float32, **settings):
    folder = str(hf_folder("llama3", tmp_path / "model"))
    context = RolloutConfig(**settings), torch.device("cpu")
    return VLLMEngine(EngineContext(hf_model(folder).to(dtype), *context, model_dir=folder))


ONE_ROW = replace(request([[1]], group_size=1, stops=[2], max_generated_tokens=2), vocab_size=48)


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
    engine = engine_for(tmp_path)
    engine._sleeps = True  # as on CUDA
    module, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    module.LLM = Mock()
    platforms.current_platform = Mock(is_sleep_mode_available=lambda: available)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    engine._start(ONE_ROW)
    assert module.LLM.call_args.kwargs["enable_sleep_mode"] is engine._sleeps is available


def test_it_sleeps_between_rollouts_on_cuda(tmp_path, monkeypatch):
    engine, notes = engine_for(tmp_path), []
    engine._sleeps, engine._llm, engine._vocab = True, SleepingLLM(notes), 48
    monkeypatch.setattr(engine, "_bring_weights", lambda: notes.append("weights"))
    rollout = EmptyRollout(monkeypatch, engine)
    engine.generate(ONE_ROW)
    engine.generate(ONE_ROW)
    assert notes == ["weights", "sleep 2", "wake", "weights", "sleep 2"]
    rollout.run = Mock(side_effect=KeyboardInterrupt)
    for _ in range(2):  # an interrupted rollout leaves it awake
        with pytest.raises(KeyboardInterrupt):
            engine.generate(ONE_ROW)
    assert notes[5:] == ["wake", "weights", "weights"]


def compare(model, *, vocab, temperature=1.0, change=lambda samples: None):
    """Let a guard look at eight groups of two rows; what it takes for given tokens is not read."""
    guard, generator = Guard(model), torch.Generator().manual_seed(0)
    prompts = [[5 + n] * (1 + n % 3) for n in range(8)]
    lengths = torch.tensor([3, 9, 12, 4, 80, 2, 7, 9, 1, 7, 6, 5, 3, 8, 9, 2])
    responses = torch.randint(vocab, (16, 80), generator=generator)
    logprobs = torch.zeros(16, 80)
    for row, length in enumerate(lengths.tolist()):
        prompt = prompts[row // 2]
        tokens = torch.tensor([*prompt, *responses[row, :length].tolist()])
        with torch.no_grad():
            logits = model(tokens[None])[0, len(prompt) - 1 : -1, :vocab].float() / temperature
        logprobs[row, :length] = logits.log_softmax(-1).gather(1, responses[row, :length, None])[
            :, 0
        ]
    sampled = length_mask(lengths, 80)
    sampled[:, 2:5] = False  # a reply
    samples = Samples(responses, lengths, lengths < 0, sampled, logprobs, logprobs)
    change(samples)
    asked = request(prompts, stops=(), temperature=temperature, max_generated_tokens=80)
    with torch.no_grad():
        guard.compare(asked, samples, vocab=vocab)
    return guard


@pytest.mark.parametrize("row", [1, 4, 9, 13])
def test_rows_of_several_groups_are_compared_and_of_them_what_was_sampled(row, tmp_path):
    model = hf_model(str(hf_folder("llama3", tmp_path / "model")))

    def off(columns):
        def change(samples):
            samples.sampler_logprobs[row, columns] -= 0.02

        return change

    compare(model, vocab=290, change=off(slice(2, 5)))
    with pytest.raises(ValueError, match="samples from another policy"):
        compare(model, vocab=290, change=off(5))


def test_a_cool_policy_in_bf16_and_ids_beyond_the_tokenizers_are_no_other_policy(tmp_path):
    """Temperature magnifies rounding; the trainer's log-probs in a step are over all ids."""
    model = hf_model(str(hf_folder("llama3", tmp_path / "model")))
    model.tok_embeddings.weight.data.mul_(0.02)  # all ids are about as likely
    mean, largest = (f"sampling/sampling_logp_difference/{kind}" for kind in ("mean", "max"))
    compare(model, vocab=290).check_step({largest: math.log(300 / 290)})
    with pytest.raises(ValueError, match="samples from another policy"):
        compare(model, vocab=300).check_step({largest: math.log(300 / 290)})
    model = model.bfloat16()

    def rounded(samples):
        samples.sampler_logprobs.add_(torch.randn(16, 80, generator=torch.manual_seed(0)))

    cool = compare(model, vocab=300, temperature=0.01, change=rounded)
    cool.check_step({mean: 1.0})
    for check in (
        lambda: compare(model, vocab=300, change=rounded),
        lambda: cool.check_step({mean: 11.0}),
    ):
        with pytest.raises(ValueError, match="samples from another policy"):
            check()
