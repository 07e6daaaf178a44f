"""Generation with transformers' ``generate``, for models that its modules compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchtune_grpo.machine.parallel import gathered
from torchtune_grpo.machine.segments import fill_parts
from torchtune_grpo.rollout.batch import Transcript
from torchtune_grpo.rollout.cache import CachedPrompt, Row
from torchtune_grpo.rollout.graphs import Buffers
from torchtune_grpo.rollout.request import (
    Capabilities,
    EngineContext,
    Progress,
    RolloutEngine,
    RolloutRequest,
    Turns,
    explained_by_rounding,
    must_stop,
)
from torchtune_grpo.trajectory import Samples

MAX_ROWS = 64  # at once, where the config does not say


class TransformersEngine(RolloutEngine):
    """Generation by a model's own ``generate`` and cache, with the other engines' sampler.

    ``generate`` is told which token comes next, so that a response depends on its row's key as in
    other engines. Rows are padded on the left. After a reply, a row's whole text is read again.
    """

    def __init__(self, context: EngineContext) -> None:
        from transformers import GenerationConfig

        self._model: Any = context.model
        self._settings = context.settings
        self._model.hf.generation_config = GenerationConfig()  # what ends a text is the request's
        self._buffers = Buffers(context.device)

    @classmethod
    def capabilities(cls, **arguments: object) -> Capabilities:
        return Capabilities(turns=True, filters=True, reproducible=True, modules=("transformers",))

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Samples:
        stop, group = must_stop(self._settings.deadline), request.group_size
        prompts = [CachedPrompt(tokens, rows_left=group) for tokens in request.prompts]
        rows = [Row(n, prompts[n // group], slot=n) for n in range(request.num_rows)]
        transcript = Transcript(
            request,
            slots=len(rows),
            vocab=self._model.tok_embeddings.num_embeddings,
            buffers=self._buffers,
        )
        transcript.begin(rows)
        live = rows
        with gathered(self._model):
            while live and not stop():
                most = self._settings.max_rows or MAX_ROWS
                for part in fill_parts(live, size=lambda row: 1, room=most):
                    turn = _Turn(request, transcript, part, stop)
                    self._generate(turn)
                    if request.report is not None:
                        tokens = sum(row.count for row in rows)
                        over = sum(row.ended or not row.room(request) for row in rows)
                        request.report(Progress(tokens, over, len(part), len(rows)))
                live = _answered(request.turns, live, transcript, stop)
        return transcript.samples(rows)

    def check_step(self, metrics: Mapping[str, float]) -> None:
        """Raise a ValueError if padding or the cache have made another model of the policy."""
        kind, bound = explained_by_rounding(self._model.hf.dtype)
        gap = metrics.get(f"sampling/sampling_logp_difference/{kind}", 0.0)
        if not gap <= bound:  # NaN, too
            name = self._model.hf.config.model_type
            raise ValueError(
                f"model: {name}, as config.json has it, cannot be trained: the log-probs of its "
                f"samples and the trainer's differ by {gap:.3g} ({kind}), and rounding explains "
                f"{bound}. Nothing of this step is saved."
            )

    def _generate(self, turn: _Turn) -> None:
        """Let ``generate`` add a turn's tokens to its texts, those that ``draw`` leaves."""
        from transformers import GenerationConfig

        rows = [torch.tensor(text) for text in turn.texts]
        tokens, mask = (
            pad_sequence(of_rows, batch_first=True, padding_side="left").to(self._buffers.device)
            for of_rows in (rows, [torch.ones_like(row) for row in rows])
        )
        settings = GenerationConfig(
            max_new_tokens=turn.most, do_sample=False, pad_token_id=0, use_cache=True
        )
        generate = partial(
            self._model.hf.generate,
            tokens,
            attention_mask=mask,
            generation_config=settings,
            logits_processor=[turn.draw],
            stopping_criteria=[turn.is_over],
        )
        self._model(generate)


class _Turn:
    """The next turn of some rows, none or all of which have begun."""

    def __init__(
        self,
        request: RolloutRequest,
        transcript: Transcript,
        rows: Sequence[Row],
        must_stop: Callable[[], bool],
    ) -> None:
        self._request, self._transcript = request, transcript
        self._rows, self._must_stop = rows, must_stop
        self.texts = [[*row.prompt.tokens, *row.response] for row in rows]
        self.most = max(row.room(request) for row in rows)

    def _goes_on(self, row: Row) -> bool:
        return not row.ended and row.room(self._request) > 0

    def draw(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Draw each row's next token from logits [n, V]; leave nothing else to ``generate``."""
        going = [n for n, row in enumerate(self._rows) if self._goes_on(row)]
        if not going:
            return logits
        rows, transcript = [self._rows[n] for n in going], self._transcript
        at = torch.tensor([(n, row.number, row.count) for n, row in zip(going, rows)])
        index, numbers, counts = at.to(logits.device).t()
        transcript.sample_next(rows, logits[index])
        for row, length in zip(rows, transcript.ends(rows, numbers, unseen=1), strict=True):
            row.ended = length > 0
        drawn = transcript.tokens[numbers, counts]
        return torch.full_like(logits, -torch.inf).index_put((index, drawn), logits.new_zeros(()))

    def is_over(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Tell of each row whether its turn is over: [n] bool."""
        stops = self._must_stop()
        over = [stops or not self._goes_on(row) for row in self._rows]
        return torch.tensor(over, device=tokens.device)


def _answered(
    turns: Turns | None, rows: Sequence[Row], transcript: Transcript, stop: Callable[[], bool]
) -> list[Row]:
    """Wait for the replies to all rows whose turns have ended, and return those that go on.

    Nothing then depends on the replies' time. Without its reply a row has not ended.
    """
    if turns is None:
        return []
    ended, replies = [row for row in rows if row.ended], dict[int, Sequence[int]]()
    for row in ended:
        row.response = transcript.tokens[row.number, : row.count].tolist()
        turns.end_turn(row.number, row.response, sampled=row.count - row.given)
    while len(replies) < len(ended) and not stop():
        replies |= turns.replies(wait=True)
    for row in ended:
        row.response = [*row.response, *replies.get(row.number, ())]
        row.ended = row.number in replies
    going = [row for row in ended if len(row.response) > row.count]
    if going:
        transcript.give(going)
    for row in going:
        row.begin_turn()
    return going
