"""Generation is exact: greedy decoding equals the full forward, samples follow the distribution.

Every engine test runs the native engine with few and with many live rows (so that rows retire and
waiting ones take their places), with merged and unmerged adapters.
"""

import functools
import itertools
import math
from contextlib import contextmanager
from dataclasses import replace

import memory_estimate
import pytest
import torch
from decode_attention import decode_attention  # noqa: F401
from policies import KINDS, SHAPE, VOCAB, build_policy, full_logprobs
from rollouts import (
    STOP,
    assert_same_samples,
    context,
    native,
    plain,
    random_prompts,
    request,
    responses,
    sample,
    text_of,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.models.gemma2._component_builders import gemma2

from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import SamplingParams
from torchtune_grpo.data import PromptBatch
from torchtune_grpo.rollout import batch, sample_groups
from torchtune_grpo.rollout import native as engines
from torchtune_grpo.rollout.attention import GridAttention
from torchtune_grpo.rollout.cache import GroupCache
from torchtune_grpo.rollout.engine import make_engine
from torchtune_grpo.rollout.graphs import Buffers, StepGraphs
from torchtune_grpo.rollout.native import NativeEngine
from torchtune_grpo.rollout.request import StopStrings
from torchtune_grpo.rollout.sampling import (
    Sampler,
    bytes_per_logit,
    filter_logits,
    row_keys,
    uniforms,
)
from torchtune_grpo.run import Run
from torchtune_grpo.training.optimizer import PolicyOptimizer, optimizer_step

CPU = torch.device("cpu")
FAMILIES = ("llama2", "phi3", "gemma", "dora_with_biases")
ENGINES = {
    "one_row": lambda model: native(model, max_rows=1),
    "few_rows": lambda model: native(model, max_rows=3, merge_adapters="never"),
    "all_rows": lambda model: native(model, max_rows=None, merge_adapters="always"),
}


@functools.cache
def greedy_case(kind: str):
    """A model, prompts, and its own full forward's responses to each."""
    model, prompts = build_policy(kind), [[7, 8, 9, *p] for p in random_prompts([5, 1, 9])]
    return model, prompts, plain(model, request(prompts, temperature=0.0))[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [*KINDS, *FAMILIES])
@torch.no_grad()
def test_greedy_equals_full_forward(kind, engine):
    model, prompts, expected = greedy_case(kind)
    assert_same_samples(sample(ENGINES[engine](model), prompts, temperature=0.0), expected)
    assert not model.caches_are_setup()


def test_what_all_prompts_begin_with_is_computed_once():
    model, prompts = build_policy(), random_prompts([5, 1, 9])
    counts = []
    model.tok_embeddings.register_forward_hook(lambda *call: counts.append(call[1][0].numel()))
    for beginning, tokens in (([], 15), ([7, 8, 9], 3 + 15)):
        sample(native(model), [beginning + prompt for prompt in prompts])
        assert counts[0] == tokens
        counts.clear()


def test_prompts_that_begin_alike_start_together():
    """A place that is free waits for others, as each start computes the beginning once more."""
    model, fed = build_policy(), []
    model.tok_embeddings.register_forward_hook(lambda *call: fed.append(call[1][0].numel()))
    prompts = [[*range(40), *prompt] for prompt in random_prompts([4] * 24)]
    stops = range(12)  # so that rows end at different times
    asked = {"group_size": 1, "stops": stops, "max_generated_tokens": 30}
    samples = sample(native(model, max_rows=8), prompts, **asked)
    starts = [tokens for tokens in fed if tokens > 40]
    assert starts[0] == 40 + 8 * 4 and sum(starts) - 40 * len(starts) == 24 * 4
    assert min(starts[:-1]) >= 40 + 2 * 4 and len(starts) > 3
    assert_same_samples(samples, sample(native(model), prompts, **asked))


OPTIONS = {
    "plain": {},
    "filters": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalty": {"repetition_penalty": 1.5, "min_new_tokens": 5},
    # Beyond one block of the cache.
    "long": {"max_generated_tokens": GroupCache.BLOCK + 16, "stops": (STOP,), "group_size": 2},
}


@pytest.mark.parametrize("known", [None, VOCAB - 23])
@pytest.mark.parametrize("options", [*OPTIONS.values(), {"temperature": 0.0}], ids=str)
@torch.no_grad()
def test_reported_logprobs_equal_recomputed_ones(options, known):
    """Over all ids, and over those that are sampled: never what the tokenizer does not know."""
    model, prompts = build_policy("lora"), random_prompts([4, 7])
    asked = replace(request(prompts, **{"group_size": 3, **options}), vocab_size=known)
    samples, params = native(model, max_rows=3).generate(asked), asked.params
    names = [name for name in ("top_k", "top_p", "min_p") if name in options]
    for row, response in enumerate(responses(samples)):
        assert max(response) < (known or VOCAB)
        prompt, sampled = prompts[row // asked.group_size], torch.tensor(response)[:, None]
        logits = model(torch.tensor([prompt + response]))[0, len(prompt) - 1 : -1]
        logits /= params.temperature or 1.0
        drawn_from = filter_logits(logits[:, :known], **{name: options[name] for name in names})
        for field, scores in (("sampler", logits), ("behaviour", drawn_from)):
            if field == "sampler" or (params.temperature and not params.changes_logits):
                got = getattr(samples, f"{field}_logprobs")[row, : len(response)]
                expected = scores.log_softmax(-1).gather(-1, sampled)[:, 0]
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    if options == {} and known is None:
        assert torch.equal(samples.sampler_logprobs, samples.behaviour_logprobs)


class HostRecorder:
    """Records an engine's steps as CUDA graphs do: kernels and addresses, nothing of the host.

    Recording leaves no trace; replaying runs the same kernels into the same memory. All that a step
    reads and did not make itself has to be memory that lasts. A shape is recorded from its second
    step on, with decoding attention as one operator.
    """

    def __init__(self, engine: NativeEngine) -> None:
        self._engine, self.recorded = engine, 0
        decoder, _ = engine._ready()
        decoder.has_kernel, engine._graphs = True, StepGraphs(self)
        engine._graphs.EAGER = 1

    def __call__(self, step):
        with self.recording() as replay:
            step()
        return replay

    @contextmanager
    def recording(self):
        engine = self._engine
        held = [engine._decoder.tensors(), engine._cache.tensors(), engine._buffers.tensors()]
        known = {tensor.untyped_storage().data_ptr() for tensor in itertools.chain(*held)}
        calls, undo = [], []

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "lift_fresh")
                for read in tree_leaves((args, kwargs)):
                    if isinstance(read, torch.Tensor) and read.numel():
                        assert read.untyped_storage().data_ptr() in known, (func, read.shape)
                for arg, declared in zip(args, func._schema.arguments, strict=False):
                    if declared.is_write:
                        undo.append((arg, arg.clone()))
                out = func(*args, **(kwargs or {}))
                for made in tree_leaves(out):
                    known.add(made.untyped_storage().data_ptr())
                calls.append((func, args, kwargs or {}, out))
                return out

        def replay() -> None:
            for func, args, kwargs, out in calls:
                results = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(results), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        with Recorder():
            yield replay
        for tensor, before in reversed(undo):
            tensor.copy_(before)
        self.recorded += 1


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_samples_depend_on_seed_step_prompt_and_sample_only(options, monkeypatch):
    """Not on the engine, the live rows, the order in which rows end, or the other prompts.

    Nor on what CUDA does: rows overshoot their end, and steps are replayed without their host code.
    """
    model = build_policy("qwen")
    prompts = random_prompts([5, 2, 9, 3, 7])
    options = {"group_size": 4, "stops": (STOP, 11, 30), "stop_strings": ("ab",), **options}
    options["decode"] = text_of
    global_state = torch.get_rng_state()
    expected, _ = plain(model, request(prompts, **options))
    lengths = set(expected.lengths.tolist())
    assert len(lengths) > 3  # rows do end at different times
    assert max(lengths) == options.get("max_generated_tokens", 12)
    for make in ENGINES.values():
        assert_same_samples(sample(make(model), prompts, **options), expected)
    alone = sample(ENGINES["few_rows"](model), prompts[4:], first=4, **options)
    assert responses(alone) == responses(expected)[-options["group_size"] :]
    monkeypatch.setitem(batch.POLL_STEPS, "cpu", 3)
    assert_same_samples(sample(native(model, max_rows=7), prompts, **options), expected)
    engine = native(model, max_rows=7)
    recorder = HostRecorder(engine)
    assert_same_samples(sample(engine, prompts, **options), expected)
    assert recorder.recorded > 1
    assert torch.equal(global_state, torch.get_rng_state())


@pytest.mark.parametrize("kind, merge", [("lora", "never"), ("lora", "always"), ("dora", "auto")])
@torch.no_grad()
def test_recorded_steps_serve_all_rollouts_of_a_run(kind, merge):
    """Weights change, prompts of other widths come, an evaluation is between, and memory moves."""
    model = build_policy(kind)
    engine = native(model, max_rows=7, merge_adapters=merge)
    recorder = HostRecorder(engine)
    recorded = []
    rollouts = [([5, 2, 9, 3, 7], 4), ([5, 2, 9, 3, 7], 4), ([8, 1, 1, 6, 4], 4), ([6] * 9, 1)]
    rollouts += [([3, 70, 2], 4), ([5, 2, 9, 3, 7], 4)]
    for step, (lengths, group) in enumerate(rollouts):
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.mul_(-0.7)
        if step == 2:  # as a checkpoint's weights come in
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        if step == 5:  # as other memory may be given to a parameter
            model.layers[0].attn.k_proj.weight.data = model.layers[1].attn.k_proj.weight.clone()
        options = {"group_size": group, "step": step, "temperature": 0.9}
        prompts = random_prompts(lengths, seed=step)
        got = sample(engine, prompts, **options)
        assert_same_samples(got, sample(native(model, merge_adapters=merge), prompts, **options))
        recorded.append(recorder.recorded)
    assert recorded[0] > 0
    if merge == "never":  # all stays where it is: one recording is for all rollouts alike
        assert recorded[0] == recorded[1] == recorded[2] < recorded[3]


@pytest.mark.parametrize("steps", [20, 100])
@pytest.mark.parametrize("moves", [False, True])
def test_a_shape_is_recorded_if_it_lasts(steps, moves):
    """Where weights move at each rollout, that is within one: of 100 steps, not of 20."""
    recorded, ran, held = [], [], []
    graphs = StepGraphs(lambda step: recorded.append(step) or step)
    for _ in range(3):
        held = [*held[-1:], torch.zeros(2, 3)] if moves or not held else held
        graphs.drop_unless_at(held[-1:])
        for _ in range(steps):
            graphs.run(lambda: ran.append(1), shape=steps)
    assert len(ran) == 3 * steps
    assert len(recorded) == (1 if not moves else 3 if steps > StepGraphs.EAGER else 0)


def test_graphs_are_dropped_if_a_tensor_has_another_shape_at_the_same_address():
    graphs, value, recorded = StepGraphs(lambda step: recorded.append(1) or step), torch.eye(4), []
    graphs.EAGER = 1
    for held in (value, value, value.t(), value[:2]):
        graphs.drop_unless_at([held])
        for _ in range(3):
            graphs.run(lambda: None, shape=())
    assert len(recorded) == 3


@torch.no_grad()
def test_what_cannot_be_recorded_runs_as_it_is(caplog):
    """It is tried once."""
    model, prompts = build_policy(), random_prompts([5, 2, 9])
    engine, calls = native(model), []

    @contextmanager
    def fail():
        calls.append(1)
        yield
        raise RuntimeError("operation not permitted when stream is capturing")

    HostRecorder(engine).recording = fail
    for step in range(2):
        expected = sample(native(model), prompts, step=step)
        assert_same_samples(sample(engine, prompts, step=step), expected)
    assert len(calls) == 1
    (warning,) = [r.message for r in caplog.records if "could not record" in r.message]
    assert "rollout.engine.cuda_graphs" in warning and "not permitted" in warning


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_cuda_graphs_change_nothing(caplog):
    """Nor do an evaluation's, whose cache drops those of training."""
    model, lengths = build_policy("qwen").cuda(), [5, 2, 9, 3, 7, 1, 4, 6, 8]
    engine, plain = native(model), native(model, cuda_graphs="never")
    engine._graphs.EAGER = 1
    for number, group in ((9, 1), (3, 4), (9, 1)):
        prompts, options = random_prompts(lengths[:number]), {"max_generated_tokens": 90}
        expected = sample(plain, prompts, group_size=group, **options)
        assert_same_samples(sample(engine, prompts, group_size=group, **options), expected)
        assert engine._graphs._replays
    assert "could not record" not in caplog.text


def test_noise_is_uniform_and_independent_between_keys():
    """Chi-square over 16 bins of every bit pattern's use, and correlation of neighbouring keys."""
    keys = row_keys(seed=3, step=-1, prompt_indices=[0, 7], group_size=2).tolist()
    assert keys == [  # forever: runs can be repeated with another version
        6880464804444729082,
        774806948303572691,
        -498975836111355085,
        6539196021410451607,
    ]
    keys = row_keys(seed=3, step=5, prompt_indices=range(64), group_size=16)
    assert keys.unique().numel() == 64 * 16
    draws = uniforms(keys, 100)
    assert 0 <= draws.min() and draws.max() < 1
    counts = torch.histc(draws, bins=16, min=0, max=1)
    expected = draws.numel() / 16
    assert ((counts - expected) ** 2 / expected).sum() < 44.3  # 99.99% of chi-square(15)
    centred = (draws - 0.5) * math.sqrt(12)
    limit = 4.5 / math.sqrt(draws.numel())  # 4.5 standard deviations
    assert abs((centred[1:] * centred[:-1]).mean()) < limit
    assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < limit
    other_step = row_keys(seed=3, step=6, prompt_indices=range(64), group_size=16)
    assert abs((centred * (uniforms(other_step, 100) - 0.5) * math.sqrt(12)).mean()) < limit


@pytest.mark.parametrize("share", [9, 0.6, 0], ids=["copied", "copied_in_part", "no_memory"])
@pytest.mark.parametrize("kind", ["qlora", "qdora"])
@pytest.mark.parametrize("merge", ["auto", "always", "never"])
def test_quantized_base(merge, kind, share, monkeypatch, caplog):
    """QLoRA and QDoRA agree with torchtune's own forward of the NF4 weights."""
    model = build_policy(kind)
    needed = native(model, merge_adapters=merge)._ready()[0].copied_bytes
    monkeypatch.setattr(engines, "free_bytes", lambda device: 2 * share * needed)
    engine, prompts = native(model, max_rows=4, merge_adapters=merge), random_prompts([5, 3])
    assert_same_samples(sample(engine, prompts), plain(model, request(prompts))[0])
    copied = sum(linear.copied_bytes for linear in engine._decoder.linears())
    assert 0.3 * min(share, 1) * needed <= copied <= min(share, 1) * needed
    assert ("made anew for every token, which is slow" in caplog.text) == (share < 1)


@pytest.mark.parametrize("merge", ["auto", "always", "never"])
@pytest.mark.parametrize("kind", ["llama", "lora"])
def test_without_memory_for_copies_adapters_stay_beside_the_weights(
    kind, merge, monkeypatch, caplog
):
    """Training may even need more than is free."""
    monkeypatch.setattr(engines, "free_bytes", lambda device: -1)
    decoder, _ = native(build_policy(kind), merge_adapters=merge)._ready()
    assert not any(linear.copied_bytes for linear in decoder.linears())
    messages = [record.message for record in caplog.records]
    if (kind, merge) == ("lora", "always"):
        assert messages[0].startswith("rollout.engine.merge_adapters=always: the merged weights do")
    else:
        assert not messages


def test_it_is_seen_that_a_quantized_weight_has_moved(monkeypatch):
    model = build_policy("qlora")
    monkeypatch.setattr(engines, "free_bytes", lambda device: 0)
    decoder, _ = native(model)._ready()
    graphs, recorded = StepGraphs(lambda step: recorded.append(1) or step), []
    graphs.EAGER = 1
    for moves in (False, False, True):
        if moves:
            projection = model.layers[0].attn.k_proj
            moved = projection.weight.clone()
            projection.weight = torch.nn.Parameter(moved, requires_grad=False)
        graphs.drop_unless_at(decoder.tensors())
        for _ in range(3):
            graphs.run(lambda: None, shape=())
    assert len(recorded) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("merge", ["auto", "always", "never"])
@pytest.mark.parametrize("kind", ["lora", "dora", "lora_output", "qlora", "qdora"])
@torch.no_grad()
def test_frozen_weights_are_the_same_after_several_rollouts(kind, merge, dtype):
    model, prompts = build_policy(kind, dtype), random_prompts([5, 3])
    frozen = {n: p for n, p in model.named_parameters() if "lora_" not in n and "magn" not in n}

    def bits() -> dict[str, torch.Tensor]:
        plain = {n: p.data for n, p in frozen.items()}
        nf4 = {n: p for n, p in plain.items() if isinstance(p, NF4Tensor)}
        return plain | {n: p.get_original_weight() for n, p in nf4.items()}

    before = {name: value.clone() for name, value in bits().items()}
    engine = native(model, max_rows=3, merge_adapters=merge)
    for step in range(5):
        sample(engine, prompts, step=step, max_generated_tokens=3)
        for name, parameter in model.named_parameters():
            if name not in frozen:
                parameter.mul_(-1.1)
    assert all(torch.equal(value, before[name]) for name, value in bits().items())


class Letters:
    """A tokenizer whose last id is not counted among its words."""

    stop_tokens, vocab_size, special_tokens = [STOP], 20, {"<end>": 30}
    decode = staticmethod(text_of)


@pytest.mark.parametrize("name", [*ENGINES, "late", "empty"])
@torch.no_grad()
def test_every_token_to_train_on_was_sampled_with_its_own_logprob(name, monkeypatch):
    """Nor more, with stop strings, rows that overshoot, and a deadline that leaves them empty."""
    model, prompts = build_policy("lora"), random_prompts([5, 2, 9])
    monkeypatch.setitem(batch.POLL_STEPS, "cpu", 3 if name == "late" else 1)
    own = {"late": {"max_rows": 4}, "empty": {"deadline": 1e-9}}
    engine = NativeEngine(context(model, **own[name])) if name in own else ENGINES[name](model)
    rows = sample_groups(
        engine,
        PromptBatch(prompts, [0, 1, 2], [""] * 3, {}, uses=[0] * 3, step_indices=[0, 1, 2]),
        tokenizer=Letters,
        group_size=2,
        params=SamplingParams(max_generated_tokens=9, stop_strings=("ca", "bf")),
        prefill="",
        seed=0,
        step=0,
    )
    for row, length in enumerate(rows.response_lengths.tolist()):
        mask = rows.response_mask[row].tolist()
        assert mask == [column < length for column in range(len(mask))]
        start, sampled = len(prompts[row // 2]), rows.sampler_logprobs[row, :length]
        tokens = rows.tokens[row, : start + length]
        expected = full_logprobs(model, tokens, 1.0)[0, start - 1 :]
        torch.testing.assert_close(sampled.double(), expected, atol=1e-4, rtol=0)
        ids = rows.completion_ids[row]
        assert (length == 0) == (name == "empty") and max(ids, default=0) <= 30
        text, whole = text_of(ids[:-1]), text_of(ids)
        assert STOP not in ids[:-1] and "ca" not in text and "bf" not in text
        assert rows.truncated[row] == (STOP not in ids and "ca" not in whole and "bf" not in whole)
        stopped = "stop_token" if STOP in ids else "stop_string"
        cut_off = "length" if length == 9 else "deadline"
        assert rows.completions[row].ended == (cut_off if rows.truncated[row] else stopped)


def test_a_model_that_is_not_recognised_is_refused():
    said = "native: cannot sample this model: .* is a Gemma2Attention. Set .*transformers_model"
    with pytest.raises(ValueError, match=said):
        make_engine(context(gemma2(**SHAPE, head_dim=16)))


@pytest.mark.parametrize("min_new_tokens", [0, 6, 9])
@pytest.mark.parametrize("engine", ENGINES)
def test_stop_strings_end_with_the_token_that_completes_them(engine, min_new_tokens):
    model, prompts = build_policy(), random_prompts([5, 2, 9])
    unstopped, _ = plain(model, request(prompts, stops=()))
    free = [text_of(row) for row in responses(unstopped)]
    stops = (free[1][7:10], free[3][13:16])  # across a token border, and one of them twice
    options = {"stop_strings": stops, "min_new_tokens": min_new_tokens, "decode": text_of}
    samples = sample(ENGINES[engine](model), prompts, stops=(), **options)
    ends = []
    for row, response in enumerate(responses(samples)):
        found = [free[row].find(s, max(0, 2 * min_new_tokens - len(s) - 1)) for s in stops]
        ends = [-(-(at + 3) // 2) for at in found if at >= 0]
        ends = [end for end in ends if end >= min_new_tokens]
        assert len(response) == min(ends, default=12)
        assert text_of(response) == free[row][: 2 * len(response)]
        assert bool(samples.truncated[row]) == (not ends)


def test_a_stop_string_may_overlap_the_one_before():
    strings = StopStrings(("aba",), decode=lambda tokens: "".join("ab"[n] for n in tokens))
    assert [strings.end([0, 1, 0, 1, 0], start=start) for start in (0, 3)] == [3, 5]


def test_repetition_penalty_and_min_new_tokens():
    engine, prompts = native(build_policy(), max_rows=3), random_prompts([6, 3])

    def greedy(*stops, **params):
        return responses(sample(engine, prompts, temperature=0.0, stops=stops, **params))

    plain = greedy()
    for row, response in enumerate(greedy(repetition_penalty=1e6)):  # forbids every repetition
        assert len(set(response)) == len(response)
        assert not set(response) & set(prompts[row // 2])
    first = plain[0][0]
    late = greedy(first, min_new_tokens=4)
    assert first not in late[0][:4] and len(late[0]) >= 4


def test_cache_stays_within_its_bound_is_reused_and_what_an_evaluation_took_is_given_back():
    model, prompts = build_policy(), random_prompts([5, 30, 9, 7, 2])
    engine, options = native(model, max_rows=5), {"group_size": 4, "max_generated_tokens": 70}
    bound = engine.cache_bytes(request(prompts, **options), rows=5)
    sample(engine, prompts, **options)

    def held() -> int:
        return sum(tensor.nbytes for tensor in engine._cache.tensors())

    # Twice ceil(5 / 4) prompts; 5 rows padded to 8, 30 tokens to 64, and 70 to 128.
    assert held() == 2 * 2 * 2 * 8 * 4 * (4 * 64 + 8 * 128)
    # And a step: logits and what they are made into, scores and their softmax, gate and up.
    assert held() < bound <= held() + 2**20
    kept = engine._cache.rows[0].data_ptr()
    sample(engine, prompts[:1], **options)
    assert engine._cache.rows[0].data_ptr() == kept

    engine, few = native(model), random_prompts([5, 2])
    expected = sample(engine, few, group_size=4)
    of_a_step = held()
    sample(engine, random_prompts([5] * 40), group_size=1)
    assert held() > 3 * of_a_step
    assert_same_samples(sample(engine, few, group_size=4), expected)
    assert held() == of_a_step


def test_as_many_rows_as_memory_allows(monkeypatch, caplog):
    """Once in a run it is said that these are few."""
    model, prompts = build_policy(), random_prompts([5, 30, 9, 7, 2])
    asked = request(prompts, group_size=4)
    expected = sample(native(model), prompts, group_size=4)
    limit = native(model).cache_bytes(asked, rows=8)
    assert native(model).rows_at_once(asked) == 20
    # Less than 8 rows are padded to 8, or to 4, and have no further slot for the padding.
    for share, rows in ((limit + 1, 8), (limit - 1, 7), (limit // 2, 3), (0, 1)):
        free = round(share / engines.MEMORY_SHARE)
        monkeypatch.setattr(engines, "free_bytes", lambda device, free=free: free)
        engine = native(model)
        caplog.clear()
        assert engine.rows_at_once(asked) == rows
        assert_same_samples(engine.generate(asked), expected)
        few = [f"Rollouts sample {rows} of 20 responses at once"] if rows < 5 else []
        assert [record.message.partition(",")[0] for record in caplog.records] == few


SAMPLINGS = {
    "temperature": (0.7, 1.0),
    "top_k": (None, 50),
    "top_p": (None, 0.9),
    "min_p": (None, 0.1),
    "repetition_penalty": (1.0, 1.3),
    "min_new_tokens": (0, 3),
}


@torch.no_grad()
def test_what_sampling_takes_is_known_for_all_settings():
    """Counted for logits [16, 5003], of no whole blocks; never more, and at most 40% less."""
    rows, vocab = 16, 5003
    hidden, weight = torch.randn(rows, 1), torch.randn(1, vocab)
    given = {
        "uniforms": torch.rand(rows, dtype=torch.float64),
        "counts": torch.zeros(rows),
        "seen": torch.zeros(rows, vocab, dtype=torch.bool),
    }
    for values in itertools.product(*SAMPLINGS.values()):
        options = dict(zip(SAMPLINGS, values, strict=True))
        params = SamplingParams(max_generated_tokens=8, **options)
        sampler = Sampler(params, stop_tokens=(3,), buffers=Buffers(CPU))
        with memory_estimate.LiveBytes() as live:
            sampler(hidden @ weight, **given)
        needed = live.peak / rows / vocab  # with the tokens seen, which are read by a view
        assert 0.6 * bytes_per_logit(params) < needed < bytes_per_logit(params) + 1, options


def test_a_rollout_leaves_room_for_gradients_and_the_optimizers_states(monkeypatch):
    """Of a run that trains; one that only evaluates needs none."""
    run, model = Run(load_config("tiny_arithmetic_grpo")), build_policy()
    asked = request(random_prompts([5, 30, 9, 7, 2]), group_size=4)
    share = native(model).cache_bytes(asked, rows=8) / engines.MEMORY_SHARE
    of_adam = 3 * sum(parameter.nbytes for parameter in model.parameters())

    def rows(free: float) -> int:
        monkeypatch.setattr(engines, "free_bytes", lambda device: round(free))
        return run.make_engine(model).rows_at_once(asked)

    assert [rows(share + more) for more in (9, -9)] == [8, 7]
    optimizer = run._optimizer = PolicyOptimizer(run.cfg, model)
    assert [rows(share + of_adam + more) for more in (9, -9)] == [8, 7]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer_step(optimizer.optimizer)  # then its states are there, as in a resumed run
    assert [rows(share + of_adam / 3 + more) for more in (9, -9)] == [8, 7]


def test_interrupted_rollout_leaves_the_next_one_right():
    engine, prompts = native(build_policy("lora"), max_rows=3), random_prompts([5, 2, 9])
    expected = responses(sample(engine, prompts))
    texts = [""] * 8  # the ninth look raises
    with pytest.raises(IndexError):
        sample(engine, prompts, stop_strings=("x",), decode=lambda tokens: texts.pop())
    assert responses(sample(engine, prompts)) == expected


@pytest.mark.parametrize("deadline", [0, 8])
def test_deadline_cuts_rows_where_they_are(deadline, monkeypatch):
    model, prompts = build_policy(), random_prompts([5, 2, 9])
    whole = responses(sample(native(model, max_rows=3), prompts, stops=()))
    looks = itertools.count()  # a clock that ticks at every look
    monkeypatch.setattr("time.monotonic", lambda: next(looks))
    cut = NativeEngine(context(model, max_rows=3, deadline=deadline or 1e-9))
    samples = sample(cut, prompts, stops=())
    assert samples.truncated.all()
    assert (samples.lengths.sum() > 0) == (deadline > 0) and samples.lengths.min() == 0
    assert samples.sampled.sum(dim=1).equal(samples.lengths)
    for got, expected in zip(responses(samples), whole, strict=True):
        assert got == expected[: len(got)]


def test_non_finite_row_does_not_spread_to_later_rows():
    """Row places are used again: a NaN left in the cache must not reach the next row there.

    The next row sees it, masked, while the row beside it is longer.
    """
    model = build_policy("untied")
    prompts = random_prompts([4, 5, 6, 3, 7, 2, 8])
    options = {"group_size": 1, "stops": (STOP, 11, 30, 44)}
    expected = responses(sample(native(model, max_rows=2), prompts, **options))
    assert len({len(row) for row in expected[1:]}) > 2  # places are taken at different times
    used = {*sum(prompts, []), *sum(expected, [])}
    broken = min(set(range(VOCAB)) - used)
    with torch.no_grad():
        model.tok_embeddings.weight[broken] = torch.nan
    prompts[0][-1] = broken
    got = responses(sample(native(model, max_rows=2), prompts, **options))
    assert got[1:] == expected[1:]


def test_non_finite_row_that_is_cut_off_does_not_spread_to_the_next_rollout(monkeypatch):
    model = build_policy("untied")
    prompts, options = random_prompts([4, 5, 6, 3, 7, 2, 8], seed=1), {"group_size": 1}
    options |= {"stops": (STOP, 11, 30, 44, 1, 2, 3), "seed": 1}
    expected = sample(native(model, max_rows=2), prompts, **options)
    engine, looks = NativeEngine(context(model, max_rows=2, deadline=8)), itertools.count()
    finite = model.tok_embeddings.weight.data.clone()
    model.tok_embeddings.weight.data[0] = torch.nan
    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", lambda: next(looks))  # a clock that ticks at every look
        cut = sample(engine, [[5, 6, 0], [7, 8, 9]], group_size=1, stops=())
    assert cut.truncated.all() and cut.sampler_logprobs.isnan().any(dim=1).tolist() == [True, False]
    model.tok_embeddings.weight.data.copy_(finite)
    assert_same_samples(sample(engine, prompts, **options), expected)


def test_live_rows_are_laid_out_once_as_long_as_they_stay_the_same(monkeypatch):
    laid_out, lay_out = [], GridAttention._lay_out
    monkeypatch.setattr(
        GridAttention, "_lay_out", lambda self, live: laid_out.append(1) or lay_out(self, live)
    )
    sample(native(build_policy(), max_rows=3), random_prompts([5, 2, 9]), stops=())
    assert len(laid_out) == 2  # three rows, and the next three


def test_progress_is_reported(monkeypatch):
    monkeypatch.setattr(batch, "REPORT_SECONDS", -1.0)
    seen = []
    prompts = random_prompts([5, 2, 9])
    asked = request(prompts, stops=(), max_generated_tokens=6)
    native(build_policy(), max_rows=3).generate(replace(asked, report=seen.append))
    assert [p.tokens for p in seen] == sorted(p.tokens for p in seen)
    assert all(p.live <= 3 and p.rows == 6 for p in seen)
    assert seen[-1].tokens == 36


DISTRIBUTIONS = [
    {},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"top_k": 5, "top_p": 0.8},
    {"temperature": 2.5},
    {"repetition_penalty": 1.7},
]


def draw(logits, *, uniform, seen=None, **params):
    """Tokens, sampler's and behaviour's log-probs of rows of logits."""
    sampler = Sampler(SamplingParams(max_generated_tokens=1, **params), buffers=Buffers(CPU))
    uniform = uniform.double().expand(len(logits))
    return sampler(logits, uniforms=uniform, counts=torch.zeros(len(logits)), seen=seen)


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"temperature": 0.7, "min_p": 0.001}])
def test_rows_sampled_in_parts_are_those_sampled_at_once(options, monkeypatch):
    """Three rows at a time, and the padding of a vocabulary is never drawn, though it is likely."""
    logits = torch.randn(20, 400, generator=torch.manual_seed(0))
    logits[:, 380:] += 4
    uniforms = torch.rand(20, dtype=torch.float64, generator=torch.manual_seed(1))
    params = SamplingParams(max_generated_tokens=1, repetition_penalty=1.0, **options)
    sampler = Sampler(params, vocab_size=380, buffers=Buffers(CPU))
    whole = sampler(logits, uniforms=uniforms)
    monkeypatch.setattr("torchtune_grpo.rollout.sampling._PART", 3 * 400)
    parts = sampler(logits, uniforms=uniforms)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    tokens, sampler_logprobs, behaviour_logprobs = whole
    assert tokens.max() < 380
    plain = (logits / 0.7).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(sampler_logprobs, plain, atol=1e-5, rtol=0)
    assert (behaviour_logprobs - sampler_logprobs).min() > 1


@pytest.mark.parametrize("options", DISTRIBUTIONS)
@pytest.mark.parametrize("vocab", [8, 300])
def test_sampled_frequencies_match_the_distribution(options, vocab):
    """Chi-square of 20,000 draws, at 99.99%; 300 entries reach beyond one block of the search."""
    logits = torch.full((1, vocab), -60.0)
    places = torch.linspace(0, vocab - 1, 8).long()
    logits[0, places] = torch.tensor([0.1, 1.9, -0.7, 1.2, 2.3, -3.0, 0.6, 1.5])
    seen = torch.zeros(1, vocab, dtype=torch.bool)
    seen[0, places[1]] = True
    adjusted = logits.clone()
    adjusted[0, places[1]] /= options.get("repetition_penalty", 1)
    temperature = options.get("temperature", 1)
    filters = {name: options.get(name) for name in ("top_k", "top_p", "min_p")}
    probs = filter_logits(adjusted / temperature, **filters).softmax(-1)[0]
    draws = 20_000
    tokens, sampler_logprobs, behaviour_logprobs = draw(
        logits.expand(draws, -1),
        uniform=torch.rand(draws, dtype=torch.float64, generator=torch.manual_seed(0)),
        seen=seen.expand(draws, -1),
        **options,
    )
    counts = torch.bincount(tokens, minlength=vocab)
    assert counts[probs == 0].sum() == 0
    kept = probs > 1e-6
    expected = probs[kept] * draws
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    assert chi_square < 29.9  # chi-square(7)
    torch.testing.assert_close(behaviour_logprobs, probs.log()[tokens], atol=1e-5, rtol=0)
    plain = (logits / temperature).log_softmax(-1)[0]
    torch.testing.assert_close(sampler_logprobs, plain[tokens], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"top_k": 2}, 2),
        ({"top_k": 99}, 4),
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.51}, 2),
        ({"top_p": 1.0}, 4),
        ({"min_p": 0.29}, 3),
        ({"min_p": 0.31}, 2),
    ],
)
def test_filters_keep_exactly_the_defined_tokens(filters, expected):
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    kept = filter_logits(logits, **filters)[0].isfinite()
    assert kept.tolist() == [n < expected for n in range(4)]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_never_samples_a_token_of_probability_zero(uniform):
    """Not with the last draw either, in a block whose sum is rounded up."""
    uniform = torch.tensor(uniform, dtype=torch.float64)
    logits = torch.full((2, 700), -torch.inf)
    logits[0, 2], logits[1, 690] = 0.0, 3.0
    tokens, logprobs, _ = draw(logits, uniform=uniform)
    assert tokens.tolist() == [2, 690] and (logprobs == 0).all()
    logits = torch.randn(200, 128, generator=torch.Generator().manual_seed(0))
    logits[:, 100:] = -torch.inf
    tokens, logprobs, _ = draw(logits, uniform=uniform)
    assert (tokens < 100).all() and logprobs.isfinite().all()
    if uniform > 0.5:
        assert (tokens == 99).all()
