"""A server samples from the trainer's policy, whatever happens to it."""

from dataclasses import replace

import pytest
import torch
from engine_checks import (
    CPU,
    LORA,
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
from hf_models import hf_folder
from scripted_turns import LATE, Scripted, with_turns
from vllm_serve import serving

from torchtune_grpo.config.keys import RolloutConfig
from torchtune_grpo.machine import interrupt
from torchtune_grpo.models import lora_hf_model
from torchtune_grpo.rollout.native import NativeEngine
from torchtune_grpo.rollout.request import EngineContext

pytest.importorskip("vllm")

from torchtune_grpo.rollout.vllm import VLLMServer  # noqa: E402
from torchtune_grpo.rollout.vllm.server import Server  # noqa: E402

LONGEST = 400
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = "--tokens-only --dtype float32 --max-model-len 400 --logprobs-mode processed_logprobs"
    with serving(tmp_path_factory.mktemp("server"), options) as server:
        yield server


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Its head is its embeddings."""
    folder = hf_folder("llama3", tmp_path_factory.mktemp("llama") / "model", **WIDE)
    return load(folder), folder


@pytest.fixture
def start(server):
    def make(model, folder, *, max_rows=None, **arguments):
        context = EngineContext(model, RolloutConfig(max_rows=max_rows), CPU, model_dir=str(folder))
        places = {"url": server.url, "shared": str(server.shared)}
        return VLLMServer(context, **places | {"max_model_len": LONGEST} | arguments)

    return make


def native(model, folder) -> NativeEngine:
    return NativeEngine(EngineContext(model, RolloutConfig(), CPU, model_dir=str(folder)))


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


def test_ends_noise_and_an_interrupt(llama, start, monkeypatch):
    model, folder = llama
    engine, asked = start(model, folder, max_rows=5), request()  # fewer than the 12 rows
    whole = engine.generate(asked)
    assert whole.truncated.all() and whole.lengths.tolist() == [10] * 12
    assert len({tuple(row) for row in rows(whole)}) > 9

    stop = rows(whole)[0][3]
    ended = engine.generate(request(stops=(stop,)))
    for row, full, truncated in zip(rows(ended), rows(whole), ended.truncated, strict=True):
        end = full.index(stop) + 1 if stop in full else len(full)
        assert row == full[:end] and truncated == (stop not in full)

    told = []
    monkeypatch.setattr(interrupt, "is_interrupted", lambda: len(told) > 1)
    monkeypatch.setattr("torchtune_grpo.rollout.vllm.rows.REPORT_SECONDS", 0.0)
    cut = engine.generate(replace(asked, report=told.append))
    assert len(told) == 2 and cut.truncated.all()
    assert all(row == full[: len(row)] for row, full in zip(rows(cut), rows(whole), strict=True))
    assert sum(cut.lengths.tolist()) < 120
    monkeypatch.undo()
    assert rows(engine.generate(asked)) == rows(whole)  # nothing of the cut one is left


@pytest.mark.parametrize("kind", TALKS)
def test_conversations_are_the_same_whenever_replies_come(kind, llama, start):
    found = []
    for few, late in (None, "at_once"), (None, "last_first"), (3, "much_later"):
        engine, turns = start(*llama, max_rows=few), Scripted(LATE[late])
        asked = with_turns(conversation(kind), turns)
        found.append(rows(samples := engine.generate(asked)))
        assert_plays(llama[0], asked, samples, turns, ends=TALKS[kind][1])
    assert found[0] == found[1] == found[2]
    assert max(sum(asked[0] == row for asked in turns.asked) for row in range(12)) > 2


def test_greedy_conversations_are_the_native_engines(llama, start):
    played = []
    for engine in (native(*llama), start(*llama)):
        turns = Scripted()
        asked = conversation("tokens", temperature=0.0, stops=tuple(range(200)))
        samples = engine.generate(with_turns(asked, turns))
        exact = samples.lengths.tolist(), samples.truncated.tolist(), samples.sampled.tolist()
        played.append((rows(samples), sorted(turns.asked), *exact))
    assert played[0] == played[1] and max(played[0][2]) > 10


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


def test_requests_that_are_lost_again_and_again_end_the_run(llama, start, monkeypatch):
    engine = start(*llama)
    engine.generate(request(group_size=1))
    monkeypatch.setattr(Server, "bring", lambda self, folder: None)  # another run undoes it
    with pytest.raises(ValueError, match="requests are lost again and again: .*other weights"):
        engine.generate(request(group_size=1))


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
