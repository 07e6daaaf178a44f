"""A foreign engine samples from the trainer's policy, whatever has changed in it: vLLM, for now.

Most tests know only the protocol of engines, some are of vLLM in this process and on a server.
"""

import math
import os
import sys
from dataclasses import replace

import hf_models
import pytest
import rollouts
import torch
from hf_models import MODELS, hf_folder
from policies import LORA, full_logprobs
from rollouts import LATE, Scripted, limited_reply, with_turns
from rollouts import responses as rows
from transformers import CONFIG_MAPPING
from vllm_serve import serving

from torchtune_grpo.config.keys import RolloutConfig
from torchtune_grpo.machine import interrupt
from torchtune_grpo.models import lora_hf_model
from torchtune_grpo.rollout.native import NativeEngine
from torchtune_grpo.rollout.request import EngineContext

pytest.importorskip("vllm")

from torchtune_grpo.rollout.vllm import VLLMEngine, VLLMServer  # noqa: E402
from torchtune_grpo.rollout.vllm.server import Server  # noqa: E402

CPU = torch.device("cpu")
KNOWN = 290  # ids that are sampled, of the models' 300
BOS = 1  # config.json's; a prompt has as many as it is given
PROMPTS = [[5, 6, 7, 8, 9] * 14, [5, 6, 7, 8, 9] * 13 + [1], [BOS, 12]]  # two begin alike
# Heads of this size are among those that vLLM computes on a CPU. The ends in config.json do not
# end a response; those of the request do.
WIDE = dict(hidden_size=128, head_dim=32, bos_token_id=BOS, eos_token_id=[*range(100, 200)])
LONGEST = 400  # of the server
OTHERS = {  # of those that transformers has in the version that vLLM takes
    kind: name
    for name, (kind, _) in MODELS.items()
    if kind in CONFIG_MAPPING and kind != "llama" and name != "phi3_longrope"
}


# --- Models, requests and checks ----------------------------------------------------------------


def load(folder, *, dtype=torch.float32, **settings):
    """The model of a folder as a trainer has it."""
    with torch.random.fork_rng():
        model = hf_models.load(folder, **settings)
    for name, parameter in model.named_parameters():
        if "lora" not in name and "magnitude" not in name:  # these stay float32
            parameter.data = parameter.data.to(dtype)
    return model


def request(prompts=PROMPTS, **options):
    options = {"group_size": 4, "stops": (), "max_generated_tokens": 10, **options}
    return replace(rollouts.request(prompts, **options), vocab_size=KNOWN)


@torch.no_grad()
def gap(model, asked, samples) -> float:
    """The largest difference to the log-probs of all rows' tokens by the trainer's full forward."""
    largest = 0.0
    for n, length in enumerate(samples.lengths.tolist()):
        prompt = asked.prompts[n // asked.group_size]
        row = torch.tensor([*prompt, *samples.responses[n, :length].tolist()])
        logits = model(row[None])[0, len(prompt) - 1 : -1, :KNOWN].double()
        log_p = (logits / (asked.params.temperature or 1.0)).log_softmax(dim=-1)
        own = log_p.gather(1, row[len(prompt) :, None])[:, 0]
        difference = (own - samples.sampler_logprobs[n, :length].double()).abs()
        sampled = samples.sampled[n, :length]
        assert length and (asked.turns or sampled.all()) and not samples.sampled[n, length:].any()
        largest = max(largest, difference[sampled].max().item())
    return largest


@torch.no_grad()
def change(parameter) -> None:
    generator = torch.Generator().manual_seed(parameter.numel())
    noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    parameter.add_(noise * (0.5 * parameter.float().std() if parameter.dim() > 1 else 0.3))


def spell(tokens) -> str:
    return "".join(f"<{token}>" for token in tokens)


TALKS = {  # what a turn ends with, by how it is told
    "tokens": (dict(stops=tuple(range(2, 60))), lambda turn: turn[-1:] and 2 <= turn[-1] < 60),
    "strings": (
        dict(stop_strings=("7>", "1><2"), decode=spell),  # the second spans two tokens
        lambda turn: "7>" in spell(turn) or "1><2" in spell(turn),
    ),
}


def conversation(kind, **options):
    options = {"max_generated_tokens": 14, **TALKS[kind][0], **options}
    return replace(request(**options), row_limit=30)


def assert_plays(model, asked, samples, turns, *, ends) -> None:
    """All that is returned follows from the tokens that were sampled."""
    limits = turns.limits
    assert gap(model, asked, samples) < 1e-4
    for n, row in enumerate(rows(samples)):
        mask, begin, reply = [True] * len(row), 0, None
        for turn, (_, response, sampled) in enumerate(a for a in turns.asked if a[0] == n):
            assert row[: len(response)] == response and sampled == sum(mask[: len(response)])
            assert ends(response[begin:]) and not ends(response[begin:-1])
            reply = limited_reply(n, response, turn, sampled, limits)
            begin = len(response) + len(reply)
            assert row[len(response) : begin] == reply
            mask[len(response) : begin] = [False] * len(reply)
        assert samples.sampled[n, : len(row)].tolist() == mask
        assert samples.truncated[n] == (reply != [])
        if samples.truncated[n]:
            assert not ends(row[begin:]) and (sum(mask) == limits[0] or len(row) == limits[1])
        else:
            assert len(row) == begin
    assert not samples.sampler_logprobs[~samples.sampled].any()
    assert not samples.behaviour_logprobs[~samples.sampled].any()


# --- vLLM in this process, and some with a server ------------------------------------------------


def checksum(model) -> list[float]:
    return [p.double().sum().item() + p.double().square().sum().item() for p in model.parameters()]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), LONGEST) as server:
        yield server


@pytest.fixture
def start(request):
    """Makes an engine for a model, and ends it after the test: vLLM, or also one with a server."""
    started, with_server = [], getattr(request, "param", "vllm") == "server"

    def make(model, folder, *, max_rows=None, deadline=None, **arguments):
        settings = RolloutConfig(max_rows=max_rows, deadline=deadline)
        context = EngineContext(model, settings, CPU, model_dir=str(folder))
        if with_server:
            server = request.getfixturevalue("server")
            places = {"url": server.url, "shared": str(server.shared), "max_model_len": LONGEST}
            return VLLMServer(context, **places | arguments)
        started.append(VLLMEngine(context, **arguments))
        return started[-1]

    yield make
    for engine in started:
        engine.close()


BOTH = pytest.mark.parametrize("start", ["vllm", "server"], indirect=True)
WITH_A_SERVER = pytest.mark.parametrize("start", ["server"], indirect=True)


def native(model, folder) -> NativeEngine:
    return NativeEngine(EngineContext(model, RolloutConfig(), CPU, model_dir=str(folder)))


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
@BOTH
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
    string = spell(spelled)[1:-1]  # begins and ends within a token
    ended = engine.generate(request(stop_strings=(string,), decode=spell))
    assert len(rows(ended)[1]) <= 4 and not ended.truncated[1]
    assert string in spell(rows(ended)[1]) and string not in spell(rows(ended)[1][:-1])

    greedy = request(temperature=0.0)
    samples = engine.generate(greedy)
    assert gap(model, greedy, samples) < 1e-4 and not samples.behaviour_logprobs.any()
    assert rows(samples)[0] == rows(samples)[3]

    told = []
    monkeypatch.setattr(interrupt, "is_interrupted", lambda: len(told) > 1)
    monkeypatch.setattr("torchtune_grpo.rollout.vllm.rows.REPORT_SECONDS", 0.0)
    cut = engine.generate(replace(asked, report=told.append))
    assert len(told) == 2 and told[-1].rows == 12 and cut.truncated.all()
    assert all(row == full[: len(row)] for row, full in zip(rows(cut), rows(whole), strict=True))
    if isinstance(engine, VLLMServer):  # of whose tokens some may be under way
        assert sum(cut.lengths.tolist()) < 120
    else:
        assert told[-1].live == 5 and sorted(cut.lengths.tolist()) == [0] * 7 + [2] * 5
    monkeypatch.undo()
    assert rows(engine.generate(asked)) == rows(whole)  # nothing of the cut one is left


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("kind", TALKS)
def test_conversations_are_the_same_whenever_replies_come(kind, llama, start):
    """With many rows at once the bits, too, and with three the tokens; of a server the tokens."""
    model, found = llama[0], []
    for few in (None, 3):
        engine = start(*llama, max_rows=few)
        for late in LATE.values():
            turns = Scripted(late)
            asked = with_turns(conversation(kind), turns)
            found.append(engine.generate(asked))
            assert rows(found[-1]) == rows(found[0])
            alike = found[0] if few is None else found[len(LATE)]
            is_same = torch.equal(found[-1].sampler_logprobs, alike.sampler_logprobs)
            assert is_same or isinstance(engine, VLLMServer)
            assert_plays(model, asked, found[-1], turns, ends=TALKS[kind][1])
        assert turns.waits
    counts = [sum(asked[0] == row for asked in turns.asked) for row in range(12)]
    assert max(counts) > 2 and found[0].truncated.any() and not found[0].truncated.all()


@pytest.mark.slow
@BOTH
def test_greedy_conversations_are_the_native_engines(llama, start):
    played = []
    for engine in (native(*llama), start(*llama)):
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


# --- A server, and what may happen to it --------------------------------------------------------


@pytest.mark.slow
@WITH_A_SERVER
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_each_step_is_sampled_with_as_by_the_native_engine(kind, start, tmp_path):
    folder = hf_folder("llama3", tmp_path / "model", **WIDE)
    model = load(folder) if kind == "full" else load(folder, build=lora_hf_model, **LORA)
    engine, first = start(model, folder), None
    trained = [p for name, p in model.named_parameters() if kind == "full" or "lora_b" in name]
    for _ in range(3):  # the same prompts each time, so that stale keys would show
        asked = request()
        samples = engine.generate(asked)
        assert gap(model, asked, samples) < 1e-4
        asked = request(temperature=0.0)
        greedy = engine.generate(asked)
        assert gap(model, asked, greedy) < 1e-4
        assert rows(greedy) == rows(native(model, folder).generate(asked))
        assert rows(samples) != first
        first = rows(samples)
        for parameter in trained:
            if kind == "full":
                change(parameter)
            else:
                parameter.data += torch.randn(parameter.shape) * 0.1


@pytest.mark.slow
@WITH_A_SERVER
def test_a_server_that_has_old_weights_in_the_middle_of_a_rollout_gets_the_new_ones(
    server, start, tmp_path, monkeypatch
):
    """It is then as after a start with the first folder, only that no connection broke."""
    folder = hf_folder("llama3", tmp_path / "model", **WIDE)
    model, old = load(folder), tmp_path / "old"
    engine, asked = start(model, folder), request(max_generated_tokens=150)
    engine.generate(asked)
    (server.shared / "policy").resolve().rename(old)
    for parameter in model.parameters():
        change(parameter)
    whole = engine.generate(asked)
    assert gap(model, asked, whole) < 1e-4

    seen = []

    def forget(progress):
        seen.append(progress.tokens)
        if len(seen) == 13:
            server.ask("/pause?mode=keep")
            reload = {"weights_path": str(old)}
            server.ask("/collective_rpc", method="reload_weights", kwargs=reload)
            server.ask("/update_weight_version", new_version="default")
            server.ask("/resume")

    monkeypatch.setattr("torchtune_grpo.rollout.vllm.rows.REPORT_SECONDS", 0.0)
    samples = engine.generate(replace(asked, report=forget))
    assert seen != sorted(seen)  # what was lost has begun anew
    assert rows(samples) == rows(whole)
    assert gap(model, asked, samples) < 1e-4


@pytest.mark.slow
@WITH_A_SERVER
def test_requests_that_are_lost_again_and_again_end_the_run(llama, start, monkeypatch):
    engine = start(*llama)
    engine.generate(request(group_size=1))
    monkeypatch.setattr(Server, "bring", lambda self, folder: None)  # another run undoes it
    with pytest.raises(ValueError, match="requests are lost again and again: .*other weights"):
        engine.generate(request(group_size=1))


@pytest.mark.slow
@WITH_A_SERVER
def test_what_the_server_lacks_is_one_line(server, llama, start, tmp_path):
    command = f"VLLM_SERVER_DEV_MODE=1 vllm serve {server.shared}/policy --tokens-only"
    start(*llama).generate(request(group_size=1))
    with pytest.raises(ValueError, match=f"has max_model_len=400, .* needs 300: {command}"):
        start(*llama, max_model_len=300).generate(request())
    half = load(llama[1], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="has dtype=float32, and the run needs bfloat16"):
        start(half, llama[1]).generate(request())
    nowhere = {"url": "http://127.0.0.1:9", "patience": 1.0}
    with pytest.raises(ValueError, match=f":9: has not answered for 1 s .*: {command}"):
        start(*llama, **nowhere).generate(request())
