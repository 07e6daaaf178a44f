"""A teacher: a frozen model that says how likely each sampled token would have been to it.

It is another model with the policy's tokens, or the policy as it was before training. It may see
more than the policy does, such as the answer. No answers of its own are sampled: the tokens that
the policy has sampled get an advantage each, see ``token_advantages``.

Sources: Lu et al. 2025, "On-Policy Distillation" (Thinking Machines); the policy with a privileged
prompt: Hübotter et al. 2026 (arXiv:2601.20802), which also lets the teacher follow the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchtune_grpo.advantages import all_wrong
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.data.chat import PromptEncoder, PromptText
from torchtune_grpo.rewards import RewardScores
from torchtune_grpo.training.reference import Reference
from torchtune_grpo.trajectory import Trajectory


def teacher_config(cfg: GRPOConfig) -> GRPOConfig:
    """Return the config of a run whose policy is the model in the teacher's folder."""
    folder = cfg.objective.teacher.model_dir
    checkpointer = {"checkpoint_dir": folder, "output_dir": cfg.output_dir}
    return cfg.replace(
        model_dir=folder,
        adapter_dir=None,
        model={"_component_": "torchtune_grpo.models.hf_model", "model_dir": folder},
        checkpointer={"_component_": "torchtune_grpo.models.HFCheckpointer", **checkpointer},
    )


class Teacher:
    """The teacher of a run; ``decider`` names the reward that says which answers are right."""

    model: Reference  # set when the policy has been built

    def __init__(self, cfg: GRPOConfig, encoder: PromptEncoder, *, decider: str) -> None:
        self._keys, self._group_size = cfg.objective.teacher, cfg.grpo_samples
        self._encoder, self._decider = encoder, decider

    def choose(self, rows: Trajectory, scores: RewardScores, kept: Tensor) -> Trajectory:
        """Set which of N scored rows it teaches, among those that are ``kept`` [N] bool."""
        assert rows.advantages is not None
        if self._keys.groups == "all_wrong":
            kept = kept & all_wrong(scores.of(self._decider), group_size=self._group_size)
        coeffs = (kept * self._keys.coeff).to(rows.advantages)
        advantages = rows.advantages * (not self._keys.alone)
        return replace(rows, advantages=advantages, teacher_coeffs=coeffs)

    def prompted(self, rows: Trajectory) -> Trajectory:
        """Put the teacher's prompts before the responses."""
        if self._keys.prompt_template is None or not rows.num_rows:
            return rows
        prompts = [
            self.encode(prompt, {name: values[n] for name, values in rows.columns.items()})
            for n, prompt in enumerate(rows.prompts)
        ]
        joined = zip(prompts, rows.response_ids, strict=True)
        tokens = [torch.tensor(prompt + response) for prompt, response in joined]
        lengths = torch.tensor([*map(len, prompts)]).to(rows.prompt_lengths)
        padded = pad_sequence(tokens, batch_first=True).to(rows.tokens)
        return replace(rows, tokens=padded, prompt_lengths=lengths)

    def encode(self, prompt: str, columns: Mapping[str, Any]) -> list[int]:
        """Return the tokens that the teacher sees before the response to a row's prompt."""
        text = str(self._keys.prompt_template).format(**{**columns, "prompt": prompt})
        if not isinstance(prompt, PromptText) or not prompt.is_chat:
            return self._encoder(text)
        *earlier, last = prompt.messages
        return self._encoder([*earlier, {**last, "content": text}])


def token_advantages(rows: Trajectory, old_logprobs: Tensor) -> Tensor:
    """Return the advantages A of n rows [n], or of their tokens if there is a teacher, [n, L].

        A + coeff * (teacher - old)     with old_logprobs [n, L], of the policy that sampled

    Over the policy's choices of a token, the mean of ``old - teacher`` is KL(policy || teacher)
    there, and the surrogate's gradient is that of A and of this KL.
    """
    assert rows.advantages is not None
    if rows.teacher_coeffs is None or rows.teacher_logprobs is None:
        return rows.advantages
    coeffs = rows.teacher_coeffs[:, None]
    gap = rows.teacher_logprobs - old_logprobs.detach()
    return rows.advantages[:, None] + coeffs * gap.where(rows.response_mask & (coeffs > 0), 0)
