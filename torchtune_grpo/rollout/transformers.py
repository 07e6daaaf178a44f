"""Generation with transformers' ``generate``, for models that its modules compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchtune import utils

from torchtune_grpo.machine.parallel import gathered
from torchtune_grpo.machine.segments import fill_parts
from torchtune_grpo.models.auto import TransformersModel
from torchtune_grpo.rollout.batch import Transcript
from torchtune_grpo.rollout.cache import CachedPrompt, Row
from torchtune_grpo.rollout.graphs import Buffers
from torchtune_grpo.rollout.paused import PausedRows
from torchtune_grpo.rollout.request import (
    Capabilities,
    EngineContext,
    Progress,
    RolloutEngine,
    RolloutRequest,
    must_stop,
)
from torchtune_grpo.trajectory import Samples

log = utils.get_logger("INFO")

MAX_ROWS = 64  # at once, where the config does not say
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest logit
Step = Callable[[Tensor, Tensor], Tensor]  # tokens and logits so far -> what generate wants


class TransformersEngine(RolloutEngine):
    """Generation by a model's own ``generate`` and cache, with the other engines' sampler.

    ``generate`` is told which token comes next, so that a response depends on its row's key as in
    other engines. Rows are padded on the left; if that changes a model's logits, only rows of one
    length are generated together. After a reply to a turn, a row's whole text is read again.
    """

    def __init__(self, context: EngineContext) -> None:
        if not isinstance(context.model, TransformersModel):
            raise ValueError(
                "rollout.engine=transformers: only generates with models that transformers' "
                "modules compute (docs/models.md#any-other-model); set rollout.engine to native."
            )
        from transformers import GenerationConfig

        self._model, self._settings = context.model, context.settings
        self._model.hf.generation_config = GenerationConfig()  # what ends a text is the request's
        self._buffers = Buffers(context.device)

    @classmethod
    def capabilities(cls, **arguments: object) -> Capabilities:
        return Capabilities(turns=True, filters=True, reproducible=True)

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
        transcript.begin([row.prompt.tokens for row in rows], slots=range(len(rows)))
        paused, live = PausedRows(request.turns), rows
        paused.steps = 0  # all replies are waited for, so that nothing depends on their time
        with gathered(self._model):
            while live and not stop():
                for part in self._parts(live):
                    turn = _Turn(request, transcript, part, stop)
                    self._generate(turn.texts, turn.draw, turn.is_over, most=turn.most)
                    if request.report is not None:
                        request.report(_progress(rows, live))
                live = _answered(paused, live, transcript, stop)
        return transcript.samples(
            lengths=[row.count for row in rows],
            truncated=[not row.ended or row.number in paused.rows for row in rows],
        )

    def _parts(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Split rows into those that are generated together."""
        alike: dict[int, list[Row]] = {}
        lengths = [len(row.prompt.tokens) + len(row.response) for row in rows]
        differ = len({*lengths}) > 1 and not self._may_pad
        for row, length in zip(rows, lengths, strict=True):
            alike.setdefault(length if differ else 0, []).append(row)
        most = self._settings.max_rows or MAX_ROWS
        parts = [fill_parts(each, size=lambda row: 1, room=most) for each in alike.values()]
        return [part for each in parts for part in each]

    @cached_property
    def _may_pad(self) -> bool:
        """Whether a row padded on the left has the logits that it has alone, at two tokens."""
        found: list[list[Tensor]] = []

        def note(tokens: Tensor, logits: Tensor) -> Tensor:
            found[-1].append(logits[-1].clone())
            return torch.zeros_like(logits)  # the next token is 0

        for texts in ([[3, 4]], [[1, 2, 3, 4, 5], [3, 4]]):
            found.append([])
            self._generate(texts, note, None, most=2)
        alone, padded = (torch.stack(logits) for logits in found)
        bound = _ROUNDING.get(self._model.hf.dtype, 5e-2) * alone.abs().max()
        if (alone - padded).abs().max() <= bound:
            return True
        kind = self._model.hf.config.model_type
        log.info(f"Padding changes the logits of {kind}: only rows of one length share a pass.")
        return False

    def _generate(
        self, texts: Sequence[Sequence[int]], draw: Step, is_over: Step | None, *, most: int
    ) -> None:
        """Let ``generate`` add up to ``most`` tokens to texts [n], those that ``draw`` leaves."""
        from transformers import GenerationConfig

        rows = [torch.tensor(text) for text in texts]
        tokens, mask = (
            pad_sequence(of_rows, batch_first=True, padding_side="left").to(self._buffers.device)
            for of_rows in (rows, [torch.ones_like(row) for row in rows])
        )
        settings = GenerationConfig(
            max_new_tokens=most, do_sample=False, pad_token_id=0, use_cache=True
        )
        generate = partial(
            self._model.hf.generate,
            tokens,
            attention_mask=mask,
            generation_config=settings,
            logits_processor=[draw],
            stopping_criteria=[] if is_over is None else [is_over],
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
        self._transcript, self._rows, self._must_stop = transcript, rows, must_stop
        self._limits = request.params.max_generated_tokens, request.max_row_tokens
        self.texts = [[*row.prompt.tokens, *row.response] for row in rows]
        self.most = max(map(self._room, rows))

    def _room(self, row: Row) -> int:
        sampled, whole = self._limits
        return min(sampled - (row.count - row.given), whole - row.count)

    def draw(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Draw each row's next token from logits [n, V]; leave nothing else to ``generate``."""
        going = [n for n, row in enumerate(self._rows) if not row.ended and self._room(row)]
        if not going:
            return logits
        rows, transcript = [self._rows[n] for n in going], self._transcript
        at = torch.tensor([(n, r.number, r.slot, r.count) for n, r in zip(going, rows)])
        index, numbers, slots, counts = at.to(logits.device).t()
        last = None if not rows[0].count else counts - 1
        transcript.sample(logits[index], numbers=numbers, last=last, slots=slots)
        for row in rows:
            row.count += 1
        ends = transcript.ends(
            numbers, counts=[r.count for r in rows], begins=[r.begin for r in rows], unseen=1
        )
        for row, length in zip(rows, ends, strict=True):
            row.ended = length > 0
        drawn = transcript.tokens[numbers, counts]
        return torch.full_like(logits, -torch.inf).index_put((index, drawn), logits.new_zeros(()))

    def is_over(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Tell of each row whether its turn is over: [n] bool."""
        stops = self._must_stop()
        over = [stops or row.ended or not self._room(row) for row in self._rows]
        return torch.tensor(over, device=tokens.device)


def _answered(
    paused: PausedRows, rows: Sequence[Row], transcript: Transcript, stop: Callable[[], bool]
) -> list[Row]:
    """Ask for replies to the rows whose turns have ended, and return those that go on."""
    if paused.turns is None:
        return []
    for row in rows:
        if row.ended:
            row.response = transcript.tokens[row.number, : row.count].tolist()
            paused.add(row, now=0)
    replies = None
    while replies is None and not stop():
        replies = paused.answered(now=0, live=0, is_idle=True)
    answered = [(paused.pop(number), reply) for number, reply in (replies or {}).items()]
    going = [row for row, reply in answered if reply]
    if going:
        transcript.give(going)
    for row in going:
        row.given += len(row.response) - row.count
        row.begin = row.count = len(row.response)
        row.ended = False
    return going


def _progress(rows: Sequence[Row], live: Sequence[Row]) -> Progress:
    begun = sum(row.count > 0 and not row.ended for row in live)
    finished = sum(row.count > 0 for row in rows) - begun
    return Progress(sum(row.count for row in rows), finished, begun, len(rows))
