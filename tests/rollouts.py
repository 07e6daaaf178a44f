"""Requests for rollouts, in what two of them agree, and the plain loop that is right."""

import torch
from policies import VOCAB, next_token
from scripted_turns import limited_reply

from torchtune_grpo.config.keys import RolloutConfig, SamplingParams
from torchtune_grpo.rollout.graphs import Buffers
from torchtune_grpo.rollout.native import NativeEngine
from torchtune_grpo.rollout.request import EngineContext, RolloutRequest, StopStrings
from torchtune_grpo.rollout.sampling import Sampler, row_keys, uniforms
from torchtune_grpo.trajectory import Samples

STOP = 7


def context(model, **settings) -> EngineContext:
    return EngineContext(model, RolloutConfig(**settings), next(model.parameters()).device)


def native(model, *, max_rows=None, **arguments) -> NativeEngine:
    return NativeEngine(context(model, max_rows=max_rows), **arguments)


def random_prompts(lengths: list[int], *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def request(
    prompts, *, group_size=2, seed=0, step=0, first=0, stops=(STOP,), decode=None, **params
) -> RolloutRequest:
    """``first`` is the place of the first prompt in the data set."""
    indices = range(first, first + len(prompts))
    return RolloutRequest(
        prompts=prompts,
        group_size=group_size,
        params=SamplingParams(**{"max_generated_tokens": 12, **params}),
        stop_tokens=stops,
        keys=row_keys(seed=seed, step=step, prompt_indices=indices, group_size=group_size),
        decode=decode,
    )


def sample(engine, prompts, **options):
    return engine.generate(request(prompts, **options))


def responses(samples) -> list[list[int]]:
    rows = zip(samples.responses.tolist(), samples.lengths.tolist(), strict=True)
    return [row[:length] for row, length in rows]


def text_of(tokens) -> str:
    """Two letters a token, so that a stop string can begin and end inside one."""
    return "".join(chr(97 + token % 26) + chr(97 + token // 26) for token in tokens)


def assert_same_samples(got, expected) -> None:
    """Same tokens, ends and log-probs; what stands behind a response's end is undefined."""
    assert responses(got) == responses(expected)
    assert torch.equal(got.truncated, expected.truncated)
    for field in ("sampler_logprobs", "behaviour_logprobs"):
        for row, length in enumerate(expected.lengths.tolist()):
            a, b = (getattr(samples, field)[row, :length] for samples in (got, expected))
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@torch.no_grad()
def plain(model, asked: RolloutRequest) -> tuple[Samples, list[tuple]]:
    """Sample every row by itself, with the whole sequence's logits for each token.

    If the request has turns, they get the replies of ``limited_reply``. Returns what it asked them.
    """
    params, limit = asked.params, asked.max_row_tokens
    limits = params.max_generated_tokens, limit
    sampler = Sampler(params, stop_tokens=asked.stop_tokens, buffers=Buffers(torch.device("cpu")))
    strings = params.stop_strings and StopStrings(params.stop_strings, decode=asked.decode)
    noise, rows, questions = uniforms(asked.keys, limit), [], []
    for number in range(asked.num_rows):
        prompt = asked.prompts[number // asked.group_size]
        tokens, kept, begin, turn, truncated = [], [], 0, 0, True
        while sum(sampled for sampled, *_ in kept) < limits[0] and len(tokens) < limit:
            token, known = next_token(model, sampler, prompt, tokens, noise[number])
            tokens.append(token)
            kept.append(known)
            start = max(len(tokens) - 1 - begin, params.min_new_tokens - 1 - begin)
            stops = strings and strings.end(tokens[begin:], start=start)
            if tokens[-1] not in asked.stop_tokens and not stops:
                continue
            sampled = sum(sampled for sampled, *_ in kept)
            questions.append((number, list(tokens), sampled))
            reply = limited_reply(number, tokens, turn, sampled, limits) if asked.turns else []
            if not reply:
                truncated = False
                break
            tokens, kept = tokens + reply, kept + [(False, 0.0, 0.0)] * len(reply)
            begin, turn = len(tokens), turn + 1
        rows.append((tokens, kept, truncated))
    width = max(len(tokens) for tokens, *_ in rows)

    def padded(values) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in values])

    return Samples(
        responses=padded(tokens for tokens, *_ in rows),
        lengths=torch.tensor([len(tokens) for tokens, *_ in rows]),
        truncated=torch.tensor([truncated for *_, truncated in rows]),
        sampled=padded([each[0] for each in kept] for _, kept, _ in rows).bool(),
        sampler_logprobs=padded([each[1] for each in kept] for _, kept, _ in rows),
        behaviour_logprobs=padded([each[2] for each in kept] for _, kept, _ in rows),
    ), questions
