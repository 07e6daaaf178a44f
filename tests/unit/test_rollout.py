"""Generation is exact: greedy decoding equals the full forward, samples follow the distribution."""

import pytest
import torch
from policies import VOCAB, build_policy, full_logprobs

from torchtune_grpo.data import PromptBatch
from torchtune_grpo.rollout import SamplingParams, filter_logits, generate, sample_tokens

STOP = 7
KINDS = ["llama", "untied", "qwen", "lora", "dora", "lora_output"]


def prompt_batch(lengths: list[int], *, seed: int = 0, pad: int = 3) -> PromptBatch:
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    tokens = torch.full((len(lengths), width), pad)
    for row, length in zip(tokens, lengths, strict=True):
        row[width - length :] = torch.randint(VOCAB, (length,), generator=generator)
    return PromptBatch(
        tokens=tokens,
        lengths=torch.tensor(lengths),
        indices=torch.arange(len(lengths)),
        prompts=[""] * len(lengths),
        columns={},
    )


def greedy_by_full_forward(model, prompt: torch.Tensor, limit: int) -> list[int]:
    tokens = prompt
    for _ in range(limit):
        tokens = torch.cat([tokens, model(tokens[None])[0, -1].argmax()[None]])
        if tokens[-1] == STOP:
            break
    return tokens[len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_greedy_equals_full_forward_for_left_padded_prompts(kind):
    """Also proves that padding does not matter: each row is checked without any."""
    model = build_policy(kind)
    batch = prompt_batch([5, 1, 9])
    samples = generate(
        model,
        batch,
        group_size=2,
        params=SamplingParams(max_generated_tokens=12, temperature=0.0),
        stop_tokens=[STOP],
    )
    for row in range(6):
        length = int(batch.lengths[row // 2])
        expected = greedy_by_full_forward(model, batch.tokens[row // 2, 9 - length :], 12)
        got = samples.responses[row, : samples.lengths[row]].tolist()
        assert got == expected
        assert bool(samples.truncated[row]) == (expected[-1] != STOP)
    assert not model.caches_are_setup()


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@torch.no_grad()
def test_reported_logprobs_equal_recomputed_ones(temperature):
    model = build_policy("lora")
    batch = prompt_batch([4, 7])
    samples = generate(
        model,
        batch,
        group_size=3,
        params=SamplingParams(max_generated_tokens=10, temperature=temperature, top_k=5),
        stop_tokens=[STOP],
        generator=torch.Generator().manual_seed(0),
    )
    for row in range(6):
        length, prompt = int(samples.lengths[row]), int(batch.lengths[row // 3])
        tokens = torch.cat([batch.tokens[row // 3, 7 - prompt :], samples.responses[row, :length]])
        expected = full_logprobs(model, tokens, temperature)[prompt - 1 :]
        torch.testing.assert_close(
            samples.logprobs[row, :length].double(), expected, atol=1e-5, rtol=0
        )


def test_same_generator_state_same_samples_and_global_rng_untouched():
    model, batch = build_policy(), prompt_batch([4, 7])
    params = SamplingParams(max_generated_tokens=8)

    def sample(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return generate(
            model, batch, group_size=4, params=params, stop_tokens=[], generator=generator
        ).responses

    before = torch.get_rng_state()
    first = sample(1)
    assert torch.equal(first, sample(1))
    assert not torch.equal(first, sample(2))
    assert torch.equal(before, torch.get_rng_state())
    assert any(not torch.equal(first[0], first[i]) for i in range(1, 4))  # a group varies


def test_uses_the_current_adapter():
    model, batch = build_policy("lora"), prompt_batch([6])
    params = SamplingParams(max_generated_tokens=12, temperature=0.0)
    before = generate(model, batch, group_size=1, params=params, stop_tokens=[])
    with torch.no_grad():
        model.layers[0].attn.q_proj.lora_b.weight.neg_()
        model.layers[1].mlp.w2.lora_b.weight.neg_()
    after = generate(model, batch, group_size=1, params=params, stop_tokens=[])
    assert not torch.equal(before.responses, after.responses)


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.8}, {"temperature": 2.5}],
)
def test_sampled_frequencies_match_the_distribution(options):
    """Chi-square of 40,000 draws against the 99.99% quantile for 7 degrees of freedom."""
    logits = torch.tensor([[0.1, 1.9, -0.7, 1.2, 2.3, -3.0, 0.6, 1.5]])
    options = {"temperature": 1.0, **options}
    filters = {k: options.get(k) for k in ("top_k", "top_p")}
    probs = filter_logits(logits / options["temperature"], **filters).softmax(-1)[0]
    draws = 40_000
    tokens, _ = sample_tokens(
        logits.expand(draws, -1), **options, generator=torch.Generator().manual_seed(0)
    )
    counts = torch.bincount(tokens, minlength=8)
    assert counts[probs == 0].sum() == 0
    kept = probs > 0
    expected = probs[kept] * draws
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    assert chi_square < 29.9


def test_filters_keep_exactly_the_defined_tokens():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    kept = lambda **f: (filter_logits(logits, **{"top_k": None, "top_p": None, **f}) > -1e9)[0]  # noqa: E731
    assert kept(top_k=2).tolist() == [True, True, False, False]
    assert kept(top_p=0.5).tolist() == [True, False, False, False]
    assert kept(top_p=0.51).tolist() == [True, True, False, False]
    assert kept(top_p=1.0).tolist() == [True] * 4
    assert kept(top_k=99).tolist() == [True] * 4


def test_never_samples_a_token_of_probability_zero():
    logits = torch.full((2000, 5), -torch.inf)
    logits[:, 2] = 0.0
    tokens, logprobs = sample_tokens(logits, temperature=1.0)
    assert (tokens == 2).all() and (logprobs == 0).all()
