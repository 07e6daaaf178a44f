"""Forced answers equal a plain loop that runs the model's full forward for each token."""

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from policies import VOCAB, build_policy, next_token
from test_rollout import HostRecorder, context, native, random_prompts, text_of

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import ForcedAnswerConfig, SamplingParams
from torchtune_grpo.data.dataset import PromptBatch
from torchtune_grpo.loss import make_loss
from torchtune_grpo.rollout import batch, sample_groups
from torchtune_grpo.rollout.cache import GroupCache
from torchtune_grpo.rollout.graphs import Buffers
from torchtune_grpo.rollout.native import NativeEngine
from torchtune_grpo.rollout.request import StopStrings
from torchtune_grpo.rollout.sampling import Sampler, row_keys, uniforms
from torchtune_grpo.rollout.torchtune import TorchtuneEngine
from torchtune_grpo.training import response_logprobs
from torchtune_grpo.training.mini_batches import mini_batches
from torchtune_grpo.trajectory import Trajectory

STOPS = [7, 11, 30]
GROUP, CAP, MORE = 3, 9, 10
GIVEN = [9, 7, 13]  # with a stop token, which ends nothing here
MARK = text_of([9])  # what a response has that answers


class Letters:
    """A tokenizer with two letters for a token."""

    stop_tokens, vocab_size, special_tokens = STOPS, VOCAB, {}
    decode = staticmethod(text_of)

    @staticmethod
    def encode(text, *, add_bos, add_eos):
        assert not add_bos and not add_eos
        pairs = zip(text[::2], text[1::2], strict=True)
        return [(ord(a) - 97) + 26 * (ord(b) - 97) for a, b in pairs]


FORCED = ForcedAnswerConfig(text=text_of(GIVEN), unless=MARK, max_tokens=MORE)
CASES = {
    "plain": ("qwen", {}),
    "greedy": ("lora", {"temperature": 0.0}),
    "strings": ("dora", {"stop_strings": ("ca", "bf", "nb")}),
    "penalty": ("llama", {"repetition_penalty": 1.5, "min_new_tokens": 6}),
    "filters": ("llama", {"temperature": 1.4, "top_k": 20, "top_p": 0.9}),
    "long": ("qwen", {"max_generated_tokens": GroupCache.BLOCK - 5}),
    "first": ("qwen", {"max_generated_tokens": 1}),
    "once": ("llama", {"forced_answer": FORCED.replace(unless="-")}),
    "last": ("llama", {"forced_answer": FORCED.replace(max_tokens=len(GIVEN) + 1)}),
}


@torch.no_grad()
def plain(model, prompts, params: SamplingParams) -> list[tuple]:
    """Sample each row by itself: its tokens, each one's (sampled, log-probs), whether cut off."""
    sampler = Sampler(params, stop_tokens=STOPS, buffers=Buffers(torch.device("cpu")))
    strings = params.stop_strings and StopStrings(params.stop_strings, decode=text_of)
    keys = row_keys(seed=3, step=2, prompt_indices=range(len(prompts)), group_size=GROUP)
    limit = params.max_generated_tokens
    noise, rows = uniforms(keys, limit + MORE), []
    for number in range(len(prompts) * GROUP):
        prompt, tokens, kept, begin, truncated = prompts[number // GROUP], [], [], 0, True
        while len(tokens) < (limit + params.forced_answer.max_tokens if begin else limit):
            token, known = next_token(model, sampler, prompt, tokens, noise[number])
            tokens.append(token)
            kept.append(known)
            start = max(len(tokens) - 1 - begin, params.min_new_tokens - 1 - begin)
            if tokens[-1] in STOPS or strings and strings.end(tokens[begin:], start=start):
                truncated = False
                break
            if len(tokens) == limit and params.forced_answer.unless not in text_of(tokens):
                tokens, kept = tokens + GIVEN, kept + [(False, 0.0, 0.0)] * len(GIVEN)
                begin = len(tokens)
        rows.append((tokens, kept, truncated))
    return rows


@cache
def case(name: str):
    """A model, prompts, parameters, and what the plain loop makes of them."""
    kind, options = CASES[name]
    options = {"max_generated_tokens": CAP, "forced_answer": FORCED} | options
    model, prompts = build_policy(kind), random_prompts([5, 2, 9, 4])
    params = SamplingParams(**options)
    return model, prompts, params, plain(model, prompts, params)


def sample(engine, prompts, params, *, first=0) -> Trajectory:
    indices = [*range(first, first + len(prompts))]
    return sample_groups(
        engine,
        PromptBatch(
            prompts, indices, [""] * len(prompts), {}, uses=[0] * len(prompts), step_indices=indices
        ),
        tokenizer=Letters,
        group_size=GROUP,
        params=params,
        prefill="",
        seed=3,
        step=2,
    )


def assert_equal(rows: Trajectory, expected: list[tuple]) -> None:
    assert rows.response_ids == [tokens for tokens, *_ in expected]
    assert rows.truncated.tolist() == [truncated for *_, truncated in expected]
    assert rows.forced.tolist() == [not all(k[0] for k in kept) for _, kept, _ in expected]
    assert rows.response_mask is rows.sampled
    for number, (tokens, kept, _) in enumerate(expected):
        has_stop = tokens[-1] in STOPS
        assert rows.completions[number] == text_of(tokens[:-1] if has_stop else tokens)
        mask, sampler, behaviour = zip(*kept, strict=True)
        of_row = slice(0, len(tokens))
        assert rows.sampled[number].tolist() == [
            *mask,
            *[False] * (rows.sampled.shape[1] - len(tokens)),
        ]
        for got, want in (
            (rows.sampler_logprobs, sampler),
            (rows.behaviour_logprobs, behaviour),
        ):
            torch.testing.assert_close(got[number, of_row], torch.tensor(want), atol=1e-4, rtol=0)
            assert not got[number, of_row][~torch.tensor(mask)].any()


@pytest.mark.parametrize("name", CASES)
def test_forced_answers_equal_a_plain_loop(name, monkeypatch):
    """With few rows at once and many, both attentions, replayed steps, and rows that overshoot."""
    model, prompts, params, expected = case(name)
    forced = [not all(each[0] for each in kept) for _, kept, _ in expected]
    ends = {(f, truncated) for f, (*_, truncated) in zip(forced, expected, strict=True)}
    assert any(forced) and len(ends) > 1
    for rows in (2, None):
        assert_equal(sample(native(model, max_rows=rows), prompts, params), expected)
    monkeypatch.setitem(batch.POLL_STEPS, "cpu", 3)
    assert_equal(sample(native(model, max_rows=3), prompts, params), expected)
    engine = native(model, max_rows=4)
    recorder = HostRecorder(engine)
    assert_equal(sample(engine, prompts, params), expected)
    assert recorder.recorded or name == "first"


def test_a_response_with_the_mark_is_cut_off_as_before():
    model, prompts, params, expected = case("plain")
    rows = sample(native(model), prompts, params.replace(forced_answer=ForcedAnswerConfig()))
    assert rows.forced is None
    kept = [MARK in text_of(tokens) for tokens in rows.response_ids]
    assert any(had and cut for had, cut in zip(kept, rows.truncated, strict=True))
    for had, tokens, (then, *_) in zip(kept, rows.response_ids, expected, strict=True):
        assert then == tokens if had else then[: len(tokens)] == tokens


def test_a_row_is_the_same_in_another_batch():
    model, prompts, params, expected = case("filters")
    assert_equal(sample(native(model), prompts[2:3], params, first=2), expected[6:9])


@pytest.mark.parametrize("looks", range(1, 24, 2))
def test_a_deadline_forces_no_answer(looks, monkeypatch):
    """At whatever token it comes, also just when a row has reached its limit."""
    model, prompts, params, expected = case("plain")
    clock = itertools.count()  # it ticks at every look
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    engine = NativeEngine(context(model, max_rows=None, deadline=looks))
    rows = sample(engine, prompts, params)
    for number, (tokens, kept, truncated) in enumerate(expected):
        got = rows.response_ids[number]
        assert got == tokens[: len(got)]
        assert rows.truncated[number] == (truncated or len(got) < len(tokens))
        forced = [not sampled for sampled, *_ in kept[: len(got)]]
        assert sum(forced) in (0, len(GIVEN)) and rows.forced[number] == any(forced)


def test_what_is_given_is_not_trained_on_but_read():
    """The trainer finds the sampler's log-probs behind it; a constant denominator counts it."""
    model, prompts, params, expected = case("plain")
    rows = sample(native(model), prompts, params)
    given = torch.zeros_like(rows.sampled)
    for number, (_, kept, _) in enumerate(expected):
        given[number, : len(kept)] = torch.tensor([not sampled for sampled, *_ in kept])
    assert given.sum() == rows.forced.sum() * len(GIVEN) > 0
    rows = replace(rows, advantages=torch.arange(1.0, rows.num_rows + 1))
    options = [f"sampling.forced_answer={{text: x, max_tokens: {MORE}}}", "batch_size=4"]
    options += [f"max_generated_tokens={CAP}", f"grpo_samples={GROUP}", "loss.aggregation=dr_grpo"]
    cfg = read_config(load_config("tiny_arithmetic_grpo", options))
    (batch,) = mini_batches(rows, cfg, loss=make_loss(cfg.loss), policy=model, reference=None)
    logprobs = torch.zeros(given.shape)
    for part in batch.parts:
        logprobs[part.rows], _ = response_logprobs(model, part.layout, temperature=1.0)
    gap = (logprobs - rows.sampler_logprobs)[rows.response_mask]
    assert gap.abs().max() < 1e-4
    share = 1 / (rows.num_rows * (CAP + MORE))
    assert torch.equal(batch.trajectory.weights, torch.where(rows.sampled, share, 0.0))
    probe = logprobs.detach().where(rows.response_mask, torch.nan).requires_grad_()
    ratio_of = logprobs.detach() + 0.1
    output = make_loss(cfg.loss)(
        logprobs=probe,
        old_logprobs=ratio_of.where(rows.response_mask, torch.nan),
        ref_logprobs=None,
        advantages=rows.advantages,
        weights=batch.trajectory.weights,
        response_mask=rows.response_mask,
        entropy=torch.zeros(given.shape),
        corrections=None,
    )
    output.loss.backward()
    assert not probe.grad[given].any() and probe.grad[rows.response_mask].all()


def test_what_cannot_be_forced_is_said():
    model, prompts, params, _ = case("plain")
    with pytest.raises(ValueError, match="forced_answer: TorchtuneEngine .*engine to native"):
        sample(TorchtuneEngine(context(model)), prompts, params)
    short = params.replace(forced_answer=FORCED.replace(max_tokens=len(GIVEN)))
    with pytest.raises(ValueError, match="max_tokens=3: its text has 3 tokens, .*give more"):
        sample(native(model), prompts, short)
