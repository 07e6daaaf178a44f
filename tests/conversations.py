"""Whole conversations with a policy whose turns are written down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from torchtune_grpo.config.keys import EnvironmentConfig, SamplingParams
from torchtune_grpo.data import RLDataset
from torchtune_grpo.data.dataset import collate_prompts
from torchtune_grpo.environments.environment import (
    environment_rewards,
    make_environment,
    prompt_tokenizer,
)
from torchtune_grpo.environments.kinds import make_kinds
from torchtune_grpo.rewards import RewardSet
from torchtune_grpo.rollout import Capabilities, RolloutEngine, sample_groups
from torchtune_grpo.trajectory import Samples, Trajectory, length_mask

END = "<end>"  # in a script, the token that ends a turn


def call(tool: str, **arguments: Any) -> str:
    """A call of a tool, as Qwen writes it."""
    written = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


class ScriptedEngine(RolloutEngine):
    """An engine whose row n says ``scripts[n]``, a text for each turn, as all engines would."""

    def __init__(self, tokenizer: Any, scripts: Sequence[Sequence[str]]) -> None:
        self._tokenizer, self._scripts = tokenizer, scripts
        self.asked: list[Any] = []

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(turns=True, filters=True)

    def generate(self, request: Any) -> Samples:
        self.asked.append(request)
        n = request.num_rows
        rows: list[list[int]] = [[] for _ in range(n)]
        masks: list[list[bool]] = [[] for _ in range(n)]
        left = [[*script] for script in self._scripts]
        truncated = [False] * n
        waiting = set[int]()

        def turn(row: int) -> None:
            for token in self._tokens(left[row].pop(0)):
                rows[row].append(token)
                masks[row].append(True)
                if token in request.stop_tokens or left[row][:1] == ["|"]:
                    continue
                if (
                    sum(masks[row]) >= request.params.max_generated_tokens
                    or len(rows[row]) >= request.max_row_tokens
                ):
                    truncated[row] = True
                    return
            request.turns.end_turn(row, rows[row], sampled=sum(masks[row]))
            waiting.add(row)

        for row in range(n):
            turn(row)
        while waiting:
            for row, reply in request.turns.replies(wait=True).items():
                waiting.remove(row)
                rows[row] += reply
                masks[row] += [False] * len(reply)
                assert len(rows[row]) < request.max_row_tokens or not reply
                if reply:
                    turn(row)
        lengths = torch.tensor([len(row) for row in rows])
        responses = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        sampled = pad_sequence([torch.tensor(mask) for mask in masks], batch_first=True)
        sampled &= length_mask(lengths, sampled.shape[1])
        zeros = torch.zeros(responses.shape)
        return Samples(responses, lengths, torch.tensor(truncated), sampled, zeros, zeros)

    def _tokens(self, text: str) -> list[int]:
        end = self._tokenizer.special_tokens
        names = [name for name, token in end.items() if token in self._tokenizer.stop_tokens]
        text = text.replace(END, names[-1])
        return self._tokenizer.encode(text, add_bos=False, add_eos=False)


def play(
    tokenizer: Any,
    scripts: Sequence[Sequence[str]],
    *,
    rows: Sequence[Mapping[str, Any]] = ({"prompt": [{"role": "user", "content": "Hi"}]},),
    objects: Mapping[str, Any] | None = None,
    tools: Sequence[Any] = (),
    group_size: int | None = None,
    max_tokens: int = 2000,
    chat: bool = True,
    rewards: Sequence[Any] = (),
    seed: int = 0,
    **settings: Any,
) -> tuple[Trajectory, Any]:
    """Play the scripts against environments: the trajectory, and its rewards if there are any.

    ``objects`` are environments by name (None: the only one), ``tools`` functions or dotpaths, and
    ``settings`` keys of the config's ``environment``.
    """
    for name, each in (objects or {}).items():
        node = {"_component_": f"{each.__module__}.{each.__name__}"}
        settings = {**settings, **(node if name is None else {name: node})}
    paths = [t if isinstance(t, str) else f"{t.__module__}.{t.__qualname__}" for t in tools]
    given = {f"tools.{n}": tools[n] for n, path in enumerate(paths) if "<locals>" in path}
    keys = EnvironmentConfig(**settings)
    kinds = make_kinds(keys, paths, given)
    dataset = RLDataset(prompt_tokenizer(kinds, tokenizer), rows=rows, chat=chat)
    environment = make_environment(
        kinds, keys, encoder=dataset.encoder, tokenizer=tokenizer, context=8000
    )
    scores = None
    try:
        prompts = collate_prompts([dataset[index] for index in range(len(dataset))])
        found = sample_groups(
            ScriptedEngine(tokenizer, scripts),
            prompts,
            tokenizer=tokenizer,
            group_size=group_size or len(scripts) // len(dataset),
            params=SamplingParams(max_generated_tokens=max_tokens),
            prefill=dataset.prefill,
            seed=seed,
            step=0,
            environment=environment,
        )
        own = [*rewards, *environment_rewards(kinds)]
        if own:
            scores = RewardSet.from_config(own)(
                prompts=found.prompts, completions=found.completions, columns=found.columns
            )
    finally:
        for kind in kinds.values():
            kind.close()
    return found, scores
