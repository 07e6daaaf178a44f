"""Reward models: transformers' models that turn a conversation into one number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from torchtune_grpo.machine.device import multiplies_bf16
from torchtune_grpo.trajectory import length_mask

Messages = Sequence[Mapping[str, Any]]


class RewardModel:
    """Reward that is the output of a model for sequence classification, from the model's folder.

    The model reads prompt and answer, without the answer's thinking, in its own chat template. It
    is loaded when it is first used: on the GPU, if this process sees one; in bf16, if the device
    multiplies that.
    """

    __name__ = "reward_model"
    reads = "chat"

    def __init__(self, *, model_dir: str, batch_size: int = 8) -> None:
        from transformers import AutoConfig, AutoTokenizer

        if batch_size < 1 or not Path(model_dir).is_dir():
            raise ValueError(f"batch_size={batch_size}, model_dir={model_dir}: 1 or more, a folder")
        self._folder, self._batch_size = model_dir, batch_size
        self._config = AutoConfig.from_pretrained(model_dir)
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        outputs, has_template = self._config.num_labels, self._tokenizer.chat_template is not None
        if outputs != 1 or not has_template:
            raise ValueError(
                f"model_dir={model_dir}: has num_labels={outputs}, chat template: {has_template}; "
                "give a model that has one output, and a tokenizer with a chat template"
            )

    @cached_property
    def _model(self) -> torch.nn.Module:
        from transformers import AutoModelForSequenceClassification

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with torch.random.fork_rng():  # no later draw depends on the step that loads it
            model, found = AutoModelForSequenceClassification.from_pretrained(
                self._folder, output_loading_info=True
            )
        if missing := sorted(found["missing_keys"]):
            raise ValueError(f"model_dir={self._folder}: has no weights for {missing}")
        dtype = torch.bfloat16 if multiplies_bf16(device) else torch.float32
        return model.to(device, dtype).eval()

    def __call__(
        self,
        prompts: list[Messages],
        completions: list[Messages],
        *,
        log_metric: Any = None,
        **columns: object,
    ) -> list[float | Exception]:
        rows = [self._tokens([*p, *c]) for p, c in zip(prompts, completions, strict=True)]
        if log_metric is not None:
            log_metric("tokens", sum(map(len, rows)) / len(rows))
        longest = getattr(self._config, "max_position_embeddings", None) or max(map(len, rows))
        error = ValueError(f"the conversation is longer than the {longest} tokens that it reads")
        scores: list[float | Exception] = [error] * len(rows)
        fitting = [n for n, row in enumerate(rows) if len(row) <= longest]
        fitting.sort(key=lambda n: len(rows[n]))
        # By its padding a model finds the last token, which gives the score.
        size = 1 if self._config.pad_token_id is None else self._batch_size
        for start in range(0, len(fitting), size):
            batch = fitting[start : start + size]
            for n, score in zip(batch, self._scores([rows[n] for n in batch]), strict=True):
                scores[n] = score
        return scores

    def _tokens(self, messages: Messages) -> list[int]:
        thought = [{**m, "content": str(m["content"]).rpartition("</think>")[2]} for m in messages]
        text = self._tokenizer.apply_chat_template(thought, tokenize=False)
        return self._tokenizer.encode(text, add_special_tokens=False)

    @torch.inference_mode()
    def _scores(self, rows: Sequence[list[int]]) -> list[float]:
        device = next(self._model.parameters()).device
        ids = pad_sequence([*map(torch.tensor, rows)], True, self._config.pad_token_id or 0)
        lengths = torch.tensor([*map(len, rows)])
        mask = length_mask(lengths, ids.shape[1])  # [n, T]
        found = self._model(input_ids=ids.to(device), attention_mask=mask.to(device))
        return found.logits[:, 0].float().tolist()
