"""A policy's quality on a held-out split: accuracy, pass@k and maj@k, with intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np

from torchtune_grpo.config.keys import GRPOConfig, SamplingParams
from torchtune_grpo.config.text import to_json
from torchtune_grpo.data.dataset import Item, PromptData, collate_prompts
from torchtune_grpo.environments.environment import Environment
from torchtune_grpo.evaluation import statistics
from torchtune_grpo.evaluation.answers import Answer, KeptAnswers, parts
from torchtune_grpo.evaluation.statistics import Comparison, evaluation_metrics
from torchtune_grpo.machine.parallel import gather_over_ranks, rank, world_size
from torchtune_grpo.machine.progress import Meter
from torchtune_grpo.rewards import RewardSet, TrainerState
from torchtune_grpo.rollout import sample_groups
from torchtune_grpo.rollout.request import RolloutEngine

_LEAST_ROWS = 64  # answers of a rank at once; a CPU gives fewer at a much lower rate
_MOST_SESSIONS = 256  # conversations at once, each with a process of its own


@dataclass(frozen=True)
class Answered:
    """A prompt and a policy's answers to it."""

    index: int  # in the data set
    prompt: str
    columns: dict[str, object]  # what rewards know about it
    greedy: Answer  # decoded greedily
    samples: list[Answer]  # k of them, drawn as the keys below ``evaluation`` say


@dataclass(frozen=True)
class Evaluation:
    """A policy's answers to P held-out prompts, the same on every rank."""

    answered: list[Answered]  # in the order of the data set
    graders: tuple[str, ...]  # the rewards that tell right from wrong, the deciding one first
    measure: str  # name of its mean
    seconds: float  # spent on the answers and their scores
    trained_on: float = 0.0  # share of the prompts that training has, too

    def by(self, grader: str) -> Evaluation:
        """Return the same answers as another reward sees them."""
        return replace(self, graders=(grader,))

    @cached_property
    def record(self) -> dict[str, object]:
        """What is recorded: each mean with its interval and what each prompt contributes to it.

        docs/reading_a_run.md describes the names.
        """
        found: dict[str, object] = {}
        prompts = self._prompts()
        for name, values in prompts.items():
            known = [value for value in values if value is not None]
            if name != "prompt_index" and known:
                low, high = statistics.bootstrap_interval(known)
                mean, name = float(np.mean(known)), f"eval/{name}"
                found |= {name: mean, f"{name}/low": low, f"{name}/high": high}
        answers = chain.from_iterable((each.greedy, *each.samples) for each in self.answered)
        if none := float(np.mean([answer.scores[self.graders[0]] is None for answer in answers])):
            found["eval/none"] = none
        greedy = [each.greedy for each in self.answered]
        found["eval/mean_length"] = float(np.mean([answer.tokens for answer in greedy]))
        found["eval/clipped_ratio"] = float(np.mean([answer.truncated for answer in greedy]))
        if self.trained_on:
            found["trained_on"] = self.trained_on
        return {**found, "measure": self.measure, "prompts": prompts}

    def _prompts(self) -> dict[str, list[Any]]:
        """Return the values behind each mean; None for a prompt with too few scored answers."""
        reward, answered = self.graders[0], self.answered
        found: dict[str, list[object]] = {"prompt_index": [each.index for each in answered]}
        found["accuracy"] = [each.greedy.scores[reward] for each in answered]
        scored = [[a for a in each.samples if a.scores[reward] is not None] for each in answered]
        values = [[answer.scores[reward] or 0.0 for answer in answers] for answers in scored]
        k = len(answered[0].samples)
        for n in statistics.passes(k):
            found[f"pass@{n}"] = [
                statistics.pass_at_k(each, n) if len(each) >= n else None for each in values
            ]
        if k > 1 and reward in answered[0].greedy.stated:
            votes = (statistics.majority([a.stated[reward] for a in each]) for each in scored)
            found[f"maj@{k}"] = [
                (0.0 if vote is None else each[vote]) if each else None
                for each, vote in zip(values, votes, strict=True)
            ]
        return found


def compare_policies(found: Mapping[str, Evaluation], *, by: str | None) -> dict[str, object]:
    """Compare evaluations ``before`` and perhaps ``after`` training, by prompt group.

    The groups are all prompts, and those with the same value in the column ``by``. Each holds its
    number of ``prompts`` and, by the name of each reward that tells right from wrong, the record of
    each evaluation and the ``change``.
    """
    before = found["before"].answered
    groups = {"all": [*range(len(before))]}
    if by is not None:
        for row, each in enumerate(before):
            groups.setdefault(f"{by}={each.columns[by]}", []).append(row)
    compared: dict[str, object] = {}
    for name, rows in groups.items():
        parts = {
            who: replace(each, answered=[each.answered[row] for row in rows])
            for who, each in found.items()
        }
        graders = {grader: _compared(parts, grader) for grader in found["before"].graders}
        compared[name] = {"prompts": len(rows), "graders": graders}
    return compared


def _compared(found: Mapping[str, Evaluation], grader: str) -> dict[str, dict[str, object]]:
    records = {who: evaluation.by(grader).record for who, evaluation in found.items()}
    if "after" in records:
        changes = Comparison(records["before"], records["after"]).changes
        records["change"] = {f"eval/{name}": test._asdict() for name, test in changes.items()}
    return records


def comparison_tables(groups: Mapping[str, Any]) -> list[str]:
    """Return lines for a terminal with what ``compare_policies`` has found."""
    lines = []
    for name, group in groups.items():
        for grader, found in group["graders"].items():
            compared = Comparison(found["before"], found.get("after", found["before"]))
            title = f"{name}: {group['prompts']} prompts, {grader}"
            lines += ["", *compared.table(title, ("before", "after"))]
    return lines


class Evaluator:
    """Measures a policy on a held-out split, always with the same noise.

    ``RewardSet.decider`` says which reward decides what is right.
    """

    def __init__(
        self,
        cfg: GRPOConfig,
        dataset: PromptData,
        *,
        tokenizer: object,
        rewards: RewardSet,
        environment: Environment | None = None,
        trained_on: float = 0.0,
    ) -> None:
        self._cfg, self._dataset, self._tokenizer = cfg, dataset, tokenizer
        self._rewards, self._decider = rewards, rewards.decider
        self._environment, self._trained_on = environment, trained_on
        named = {name: rewards.answer_of(name) for name in rewards.names}
        self._stated = {name: stated for name, stated in named.items() if stated is not None}
        names, best = evaluation_metrics(cfg.evaluation.samples), cfg.evaluation.keep_best
        known = [n for n in names if self._decider.name in self._stated or "maj@" not in n]
        if best not in (None, *known):
            raise ValueError(
                f"evaluation.keep_best={best}: is not measured; give one of {', '.join(known)}."
            )

    def __call__(
        self,
        engine: RolloutEngine,
        *,
        state: TrainerState | None = None,
        positions: Sequence[int] | None = None,
        kept: KeptAnswers | None = None,
    ) -> Evaluation:
        """Evaluate the engine's policy; every rank has to call it. Rewards get the ``state``.

        The prompts are those at the ``positions`` in the data set; None = all. Answers that are
        ``kept`` are not given again, and new ones are added to them.
        """
        begun, name = time.perf_counter(), self._decider.name
        rows = range(len(self._dataset)) if positions is None else positions
        # A row that cannot be used has another one in its place, which is not to count twice.
        items = [item for n in rows if (item := self._dataset[n])["index"] == n]
        k, params = self._cfg.evaluation.samples, self._cfg.eval_sampling_params
        with Meter("Evaluation", total=_share(len(items)) * (1 + k)) as meter:
            answer = partial(self._answers, engine, state=state, meter=meter)
            ask = partial(self._ask, answer, items, meter=meter, kept=kept)
            greedy, samples = ask(params.greedy, 1), ask(params, k)
        answered = []
        for item in items:
            n, prompt = item["index"], str(item["prompt"])
            answered.append(Answered(n, prompt, item["columns"], greedy[n][0], samples[n]))
        evaluation = Evaluation(
            answered,
            graders=tuple(each.name for each in self._rewards.deciders),
            measure=self._decider.measure,
            seconds=time.perf_counter() - begun,
            trained_on=self._trained_on,
        )
        if evaluation.record.get("eval/none") == 1:
            raise ValueError(
                f"eval_dataset: {name} applies to no answer; name another reward in "
                "deciding_reward, or give other prompts."
            )
        return evaluation

    def _ask(
        self,
        answer: Callable[[list[Item], SamplingParams, int], list[list[Answer]]],
        items: list[Item],
        params: SamplingParams,
        samples: int,
        *,
        meter: Meter,
        kept: KeptAnswers | None,
    ) -> dict[int, list[Answer]]:
        """Return ``samples`` responses to each item by its index, the same on every rank."""
        if samples == 0:
            return {item["index"]: [] for item in items}
        kind = f"{samples} with {params}"
        found = {} if kept is None else kept.of(kind)
        meter.skip(_share(len(found)) * samples)
        left = [item for item in items if item["index"] not in found]
        least, most = max(1, _LEAST_ROWS // samples) * world_size(), len(left)
        if self._environment is not None:
            most = max(1, _MOST_SESSIONS // samples) * world_size()
        for part in parts(left, least=least, most=most, is_kept=kept is not None):
            mine = part[rank() :: world_size()]
            # Sharding needs every rank as often: more answers are given and dropped.
            asked = mine + part[:1] * (_share(len(part)) - len(mine))
            given = answer(asked, params, samples)
            own = {item["index"]: answers for item, answers in zip(mine, given, strict=False)}
            new = dict(chain.from_iterable(each.items() for each in gather_over_ranks(own)))
            found |= new
            if kept is not None:
                kept.add(kind, new)
        return found

    def _answers(
        self,
        engine: RolloutEngine,
        items: list[Item],
        params: SamplingParams,
        samples: int,
        *,
        state: TrainerState | None,
        meter: Meter,
    ) -> list[list[Answer]]:
        """Return ``samples`` responses of this rank to each item."""
        done, tokens = meter.done, meter.tokens
        rows = sample_groups(
            engine,
            collate_prompts(items),
            tokenizer=self._tokenizer,
            group_size=samples,
            params=params,
            prefill=self._dataset.prefill,
            seed=self._cfg.seed,
            step=-1,  # noise that no training step uses
            environment=self._environment,
            report=lambda now: meter.show(done=done + now.finished, tokens=tokens + now.tokens),
        )
        tokens += int(rows.sampled_lengths.sum())
        meter.show(done=done + rows.num_rows, tokens=tokens)
        scored = self._rewards(
            prompts=rows.prompts,
            completions=rows.completions,
            columns=rows.columns,
            completion_ids=rows.completion_ids,
            trainer_state=state,
        )
        values = to_json(scored.scores.masked_fill(scored.failed, 0.0))
        lengths, truncated = rows.sampled_lengths.tolist(), rows.truncated.tolist()
        answers = [
            Answer(
                completion=text,
                tokens=lengths[row],
                truncated=truncated[row],
                scores=dict(zip(scored.names, values[row], strict=True)),
                stated={name: stated(text) for name, stated in self._stated.items()},
            )
            for row, text in enumerate(map(str, rows.completions))
        ]
        return [answers[i : i + samples] for i in range(0, len(answers), samples)]


def _share(count: int) -> int:
    """Return how many of so many prompts a rank answers, at most."""
    return -(-count // world_size())
