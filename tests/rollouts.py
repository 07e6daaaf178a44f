"""Requests for rollouts, in what two of them agree, and the plain loop that is right.

And replies that depend on a row and its response alone, whenever they come.
"""

import random
from dataclasses import replace

import torch
from policies import VOCAB, next_token

from torchtune_grpo.config.keys import RolloutConfig, SamplingParams
from torchtune_grpo.rollout.graphs import Buffers
from torchtune_grpo.rollout.native import NativeEngine
from torchtune_grpo.rollout.request import EngineContext, RolloutRequest, StopStrings
from torchtune_grpo.rollout.sampling import Sampler, row_keys, uniforms
from torchtune_grpo.trajectory import Samples

STOP = 7
STOPS = (7, 11, 30, 44, 52)
MAX_TURNS = 4


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


def reply_to(row: int, response: list[int], turn: int) -> list[int]:
    """Reply with up to 6 tokens, stop tokens and stop strings among them; at times with none."""
    chance = random.Random(f"{row} {turn} {response}")
    length = chance.choice([0, 1, 1, 3, 6])
    return [chance.choice([*STOPS, 9, 13, 21]) for _ in range(length)]


class Scripted:
    """Replies in the order and after the number of looks that ``late`` gives for a turn."""

    def __init__(self, late=lambda row, turn: 0) -> None:
        self.limits = None  # tokens that are sampled, and of a response
        self.asked: list[tuple] = []
        self._late, self._pending, self.waits = late, [], 0

    def end_turn(self, row, response, *, sampled) -> None:
        turn = sum(asked[0] == row for asked in self.asked)
        self.asked.append((row, list(response), sampled))
        reply = limited_reply(row, list(response), turn, sampled, self.limits)
        self._pending.append([self._late(row, turn), row, reply])

    def replies(self, *, wait):
        self.waits += wait
        ready = [each for each in self._pending if each[0] <= 0]
        self._pending = [[looks - 1, *more] for looks, *more in self._pending if looks > 0]
        return {row: reply for _, row, reply in reversed(ready)}


def limited_reply(row, response, turn, sampled, limits) -> list[int]:
    reply = reply_to(row, response, turn)
    fits = sampled < limits[0] and len(response) + len(reply) < limits[1]
    return reply if fits and turn < MAX_TURNS - 1 else []


def with_turns(asked: RolloutRequest, turns: Scripted) -> RolloutRequest:
    turns.limits = asked.params.max_generated_tokens, asked.max_row_tokens
    return replace(asked, turns=turns)


LATE = {
    "at_once": lambda row, turn: 0,
    "late": lambda row, turn: 5 * (row % 3) + turn,
    "last_first": lambda row, turn: 2 * (12 - row),
    "much_later": lambda row, turn: 40,
}


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
