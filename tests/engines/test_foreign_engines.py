"""A foreign engine samples from the trainer's policy, whatever has changed in it: vLLM, for now.

The tests know only the protocol of engines; another one is one more entry in ``ENGINES``.
"""

import math
import os
import sys
from dataclasses import replace

import pytest
import torch
from engine_checks import (
    CPU,
    KNOWN,
    LORA,
    PROMPTS,
    TALKS,
    WIDE,
    assert_plays,
    change,
    conversation,
    gap,
    load,
    request,
    rows,
)
from hf_models import MODELS, hf_folder
from policies import full_logprobs
from scripted_turns import LATE, Scripted, limited_reply, with_turns
from transformers import CONFIG_MAPPING

from torchtune_grpo.config.keys import RolloutConfig
from torchtune_grpo.machine import interrupt
from torchtune_grpo.models import lora_hf_model
from torchtune_grpo.rollout.native import NativeEngine
from torchtune_grpo.rollout.request import EngineContext

pytest.importorskip("vllm")

from torchtune_grpo.rollout.vllm import VLLMEngine  # noqa: E402

ENGINES = {"vllm": VLLMEngine}
OTHERS = {  # of those that transformers has in the version that vLLM takes
    kind: name
    for name, (kind, _) in MODELS.items()
    if kind in CONFIG_MAPPING and kind != "llama" and name != "phi3_longrope"
}


def checksum(model) -> list[float]:
    return [p.double().sum().item() + p.double().square().sum().item() for p in model.parameters()]


@pytest.fixture(params=ENGINES)
def start(request):
    """Makes an engine for a model, and ends it after the test."""
    started = []

    def make(model, folder, *, max_rows=None, deadline=None, **arguments):
        settings = RolloutConfig(max_rows=max_rows, deadline=deadline)
        context = EngineContext(model, settings, CPU, model_dir=str(folder))
        started.append(ENGINES[request.param](context, **arguments))
        return started[-1]

    yield make
    for engine in started:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "llama_biases"])
def test_every_weight_that_changes_is_sampled_with(name, start, tmp_path):
    folder = hf_folder(name, tmp_path / "model", **WIDE)
    model = load(folder)
    engine = start(model, folder)
    asked = request()
    before = engine.generate(asked)
    assert gap(model, asked, before) < 1e-4
    groups: dict[str, list] = {}
    for parameter_name, parameter in model.named_parameters():
        layerless = ".".join(part for part in parameter_name.split(".") if not part.isdigit())
        groups.setdefault(layerless, []).append(parameter)
    assert len(groups) >= 10
    for parameters in groups.values():  # the same prompts each time, so that stale keys would show
        for parameter in parameters:
            change(parameter)
        trained = checksum(model)
        after = engine.generate(asked)
        assert gap(model, asked, after) < 1e-4
        assert checksum(model) == trained
    assert rows(after) != rows(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS.values())
def test_each_family_is_the_trainers_before_and_after_a_change(name, start, tmp_path):
    own = {"num_attention_heads": 4} | ({"use_bias": False} if name == "ernie4_5" else {})
    if MODELS[name][1].get("sliding_window"):
        own["sliding_window"] = 64
    folder = hf_folder(name, tmp_path / "model", **WIDE | own)
    model = load(folder)
    engine, asked = start(model, folder), request([PROMPTS[0], PROMPTS[2]])
    assert gap(model, asked, engine.generate(asked)) < 1e-4
    for parameter in model.parameters():
        change(parameter)
    assert gap(model, asked, engine.generate(asked)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_each_adapter_alone_is_sampled_with(kind, start, tmp_path):
    dora, folder = kind == "dora", hf_folder("llama3", tmp_path / "model", **WIDE)
    model = load(folder, build=lora_hf_model, use_dora=dora, **LORA)
    engine, asked = start(model, folder), request()
    without = engine.generate(asked)
    modules = [module for module in model.modules() if hasattr(module, "adapter_params")]
    assert len(modules) == 14
    trained = {n: p for n, p in model.named_parameters() if "lora" not in n and "mag" not in n}
    frozen = [parameter.clone() for parameter in trained.values()]
    for module in modules:
        b = module.lora_b.weight
        for scale in (0.1, 0.2):  # the same adapter twice: its change is not added to the last
            with torch.no_grad():
                b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(1)) * scale)
                if dora:
                    module.magnitude.mul_(1.1)
            samples = engine.generate(asked)
            assert gap(model, asked, samples) < 1e-4
        differ = (samples.sampler_logprobs - without.sampler_logprobs)[:, 0].abs().max()
        assert differ > 1e-3
        with torch.no_grad():
            b.zero_()
            if dora:
                module.magnitude.div_(1.1**2)
    again = engine.generate(asked)
    torch.testing.assert_close(again.sampler_logprobs, without.sampler_logprobs)
    assert all(map(torch.equal, frozen, trained.values()))


@pytest.mark.slow
def test_twenty_merges_in_bf16_do_not_drift(start, tmp_path):
    folder = hf_folder("llama3", tmp_path / "model", **WIDE)
    model = load(folder, build=lora_hf_model, dtype=torch.bfloat16, **LORA)
    engine, asked = start(model, folder), request(group_size=1)
    first = engine.generate(asked)
    adapters = [m.lora_b.weight for m in model.modules() if hasattr(m, "adapter_params")]
    for step in range(20):
        with torch.no_grad():
            for b in adapters:
                b.fill_(0.01 * (step + 1) if step < 19 else 0.0)
        last = engine.generate(asked)
    assert rows(last) == rows(first)
    assert torch.equal(last.sampler_logprobs, first.sampler_logprobs)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = hf_folder("llama3", tmp_path_factory.mktemp("llama") / "model", **WIDE)
    return load(folder), folder


@pytest.mark.slow
def test_samples_follow_their_reported_distribution(llama, start):
    model, folder = llama
    engine = start(model, folder)
    for temperature in (1.0, 0.6):
        count = 3000
        asked = request([[5, 6]], group_size=count, max_generated_tokens=1, temperature=temperature)
        samples = engine.generate(asked)
        assert gap(model, request([[5, 6]], temperature=temperature), first_of(samples, 4)) < 1e-4
        with torch.no_grad():
            logits = model(torch.tensor([[5, 6]]))[0, -1, :KNOWN] / temperature
        expected = count * logits.double().softmax(dim=-1)
        seen = torch.bincount(samples.responses[:, 0], minlength=KNOWN).double()
        assert len(seen) == KNOWN  # no id that the tokenizer lacks
        often = expected >= 5  # the others are counted together
        seen, expected = (torch.cat([x[often], x[~often].sum()[None]]) for x in (seen, expected))
        squares = ((seen - expected).square() / expected).sum().item()
        assert squares < len(seen) + 5 * math.sqrt(2 * len(seen))  # chi-square's mean, deviation


def first_of(samples, count):
    return replace(samples, **{name: value[:count] for name, value in vars(samples).items()})


@pytest.mark.slow
def test_ends_noise_and_order(llama, start, monkeypatch):
    model, folder = llama
    engine = start(model, folder, max_rows=5)  # fewer than the 12 rows
    asked = request()
    whole = engine.generate(asked)
    assert whole.truncated.all() and whole.lengths.tolist() == [10] * 12
    assert len({tuple(row) for row in rows(whole)}) > 9
    assert rows(engine.generate(request(seed=1))) != rows(whole)
    alone = engine.generate(request(PROMPTS[:1]))
    assert rows(alone) == rows(whole)[:4]  # whatever else is sampled, as it depends on keys
    torch.testing.assert_close(
        alone.sampler_logprobs, whole.sampler_logprobs[:4], atol=1e-5, rtol=0
    )

    stop = rows(whole)[0][3]
    ended = engine.generate(request(stops=(stop,)))
    for row, full, truncated in zip(rows(ended), rows(whole), ended.truncated, strict=True):
        end = full.index(stop) + 1 if stop in full else len(full)
        assert row == full[:end]  # the stop token included
        assert truncated == (stop not in full)
    assert gap(model, asked, ended) < 1e-4

    spelled = rows(whole)[1][2:4]
    decode = lambda tokens: "".join(f"<{token}>" for token in tokens)  # noqa: E731
    string = decode(spelled)[1:-1]  # begins and ends within a token
    ended = engine.generate(request(stop_strings=(string,), decode=decode))
    assert len(rows(ended)[1]) <= 4 and not ended.truncated[1]
    assert string in decode(rows(ended)[1]) and string not in decode(rows(ended)[1][:-1])

    greedy = request(temperature=0.0)
    samples = engine.generate(greedy)
    assert gap(model, greedy, samples) < 1e-4 and not samples.behaviour_logprobs.any()
    assert rows(samples)[0] == rows(samples)[3]

    told = []
    monkeypatch.setattr(interrupt, "is_interrupted", lambda: len(told) > 1)
    monkeypatch.setattr("torchtune_grpo.rollout.vllm.rows.REPORT_SECONDS", 0.0)
    cut = engine.generate(replace(asked, report=told.append))
    assert len(told) == 2 and told[-1].rows == 12 and told[-1].live == 5
    assert sorted(cut.lengths.tolist()) == [0] * 7 + [2] * 5 and cut.truncated.all()
    monkeypatch.undo()
    assert rows(engine.generate(asked)) == rows(whole)  # nothing of the cut one is left


@pytest.mark.slow
@pytest.mark.parametrize("kind", TALKS)
def test_conversations_are_the_same_whenever_replies_come(kind, llama, start):
    """With many rows at once the bits, too, and with three the tokens."""
    model, found = llama[0], []
    for few in (None, 3):
        engine = start(*llama, max_rows=few)
        for late in LATE.values():
            turns = Scripted(late)
            asked = with_turns(conversation(kind), turns)
            found.append(engine.generate(asked))
            assert rows(found[-1]) == rows(found[0])
            alike = found[0] if few is None else found[len(LATE)]
            assert torch.equal(found[-1].sampler_logprobs, alike.sampler_logprobs)
        assert turns.waits
        assert_plays(model, asked, found[-1], turns, ends=TALKS[kind][1])
    counts = [sum(asked[0] == row for asked in turns.asked) for row in range(12)]
    assert max(counts) > 2 and found[0].truncated.any() and not found[0].truncated.all()


@pytest.mark.slow
def test_greedy_conversations_are_the_native_engines(llama, start):
    model, folder = llama
    native = NativeEngine(EngineContext(model, RolloutConfig(), CPU, model_dir=str(folder)))
    played = []
    for engine in (native, start(model, folder)):
        turns = Scripted()
        asked = conversation("tokens", temperature=0.0, stops=tuple(range(200)))
        samples = engine.generate(with_turns(asked, turns))
        exact = samples.lengths.tolist(), samples.truncated.tolist(), samples.sampled.tolist()
        played.append(
            (rows(samples), sorted(turns.asked), *exact, samples.behaviour_logprobs.any())
        )
    assert played[0] == played[1] and max(played[0][2]) > 10


@pytest.mark.slow
def test_each_turn_has_noise_of_its_own_and_an_interrupt_cuts_off_rows_that_wait(
    llama, start, monkeypatch
):
    engine, turns = start(*llama), Scripted()
    asked = conversation("tokens", group_size=30, temperature=2.0, stops=tuple(range(2, 200)))
    samples, pairs = rows(engine.generate(with_turns(asked, turns))), []
    for n, row in enumerate(samples):
        response, sampled = next((a[1], a[2]) for a in turns.asked if a[0] == n)
        reply = limited_reply(n, response, 0, sampled, turns.limits)
        if reply:  # all tokens are about as likely, so that the same noise would draw the same
            pairs.append((row[0], row[len(response) + len(reply)]))
    assert len(pairs) > 20 and sum(one == other for one, other in pairs) < len(pairs) / 4

    turns = Scripted(lambda row, turn: 10**9)
    monkeypatch.setattr(interrupt, "is_interrupted", lambda: turns.waits > 5)
    cut = engine.generate(with_turns(asked, turns))
    firsts = {row: response for row, response, _ in turns.asked}
    assert cut.truncated.all() and len(firsts) == len(turns.asked) > 10
    for n, row in enumerate(rows(cut)):
        assert row == firsts.get(n, row) == samples[n][: len(row)]
    monkeypatch.undo()
    assert rows(engine.generate(with_turns(asked, Scripted()))) == samples


@pytest.mark.slow
def test_rows_that_wait_for_memory_are_the_same(llama, start):
    roomy, tight = start(*llama), start(*llama, memory_share=1e-9)  # of one row's keys and values
    asked = request(group_size=20, max_generated_tokens=40)
    assert rows(tight.generate(asked)) == rows(roomy.generate(asked))


@pytest.mark.slow
def test_another_policy_is_told_in_the_rollout(start, tmp_path, monkeypatch):
    folder = hf_folder("llama3", tmp_path / "model", **WIDE)
    for dtype in (torch.float32, torch.bfloat16):
        model = load(folder, dtype=dtype)
        engine = start(model, folder)
        for temperature in (1.0, 0.0):
            one = dict(group_size=1, max_generated_tokens=1, temperature=temperature)
            engine.generate(request([[5]], **one))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_bring_weights", lambda: None)
            patch.setattr(engine, "_compare_weights", lambda: None)
            for parameter in model.parameters():
                change(parameter)
            with pytest.raises(ValueError, match="difference .* samples from another policy"):
                engine.generate(request())
        engine.generate(request())
    model.norm.scale.data.fill_(math.nan)
    with pytest.raises(ValueError, match="a log-prob is infinite or NaN: the policy broke"):
        engine.generate(request())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "llama_biases"])
def test_weights_that_are_off_by_their_last_bit_are_told(name, start, tmp_path, monkeypatch):
    """In bf16, whose rounding hides that from log-probs; a step that changes nothing is none."""
    folder = hf_folder(name, tmp_path / "model", **WIDE)
    model = load(folder, dtype=torch.bfloat16)
    engine, asked = start(model, folder), request(group_size=1)
    bring = engine._bring_weights
    engine.generate(asked)
    monkeypatch.setattr(engine, "_bring_weights", lambda: None)
    engine.generate(asked)
    for parameter in model.parameters():
        before = parameter.detach().clone()
        parameter.data = torch.nextafter(before, torch.full_like(before, math.inf))
        with pytest.raises(ValueError, match="weights are not .* samples from another policy"):
            engine.generate(asked)
        parameter.data = before
    engine.generate(asked)
    monkeypatch.setattr(engine, "_bring_weights", bring)
    monkeypatch.setattr("torchtune_grpo.rollout.vllm.engine._pack_head", lambda model: None)
    change(model.output.tied_module.weight if name == "llama3" else model.output.weight)
    if name == "llama3":  # its head is the embeddings, which reloading does not pack anew
        with pytest.raises(ValueError, match="weights are not .* samples from another policy"):
            engine.generate(asked)
    else:
        engine.generate(asked)


def test_a_temperature_that_it_cannot_sample_with_is_refused(llama, start):
    with pytest.raises(ValueError, match="^temperature=0.001: .* takes 0.01"):
        start(*llama).generate(request(temperature=0.001))


@pytest.mark.slow
def test_the_process_is_left_as_it_was(llama, start):
    def functions():
        found = (vars(at) for at in (sys, torch, torch.cuda, torch.accelerator))
        found = [{k: v for k, v in names.items() if callable(v) and k[0] != "_"} for names in found]
        return *found, torch.Tensor.pin_memory, torch.Tensor.record_stream

    before = dict(os.environ), torch.set_num_threads, torch.get_num_threads(), torch.get_rng_state()
    before = *before, functions()
    affinity = os.sched_getaffinity(0)
    engine = start(*llama)
    engine.generate(request())
    assert dict(os.environ) == before[0]
    assert torch.set_num_threads is before[1] and torch.get_num_threads() == before[2]
    assert torch.equal(torch.get_rng_state(), before[3])
    assert os.sched_getaffinity(0) == affinity
    assert functions() == before[4]
    engine.close()
    assert not torch.distributed.is_initialized() and functions() == before[4]
    assert full_logprobs(llama[0], torch.tensor([1, 2, 3]), 1.0).isfinite().all()
