"""How models of transformers' own modules are read, checked and written: as transformers does."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.config.text import describe, shortened
from torchtune_grpo.models.kinds import ModelKind, PeftModule
from torchtune_grpo.models.tokenizer import only_errors

PREFIX = "hf."  # of parameters' names, before transformers' own
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest number


class TransformersKind(ModelKind):
    """The kind of a ``TransformersModel``."""

    modules = "transformers"
    packs_rows = False

    def shape(self) -> dict[str, int]:
        return {}  # it is built from config.json

    @torch.no_grad()
    def check_loaded(self) -> None:
        """Raise a ValueError unless its logits are transformers' and come from earlier tokens."""
        from transformers import GenerationConfig

        model = self._model.eval()
        embeddings = model.tok_embeddings
        it = f"model: {model.hf.config.model_type}, as config.json has it,"
        tokens = torch.arange(8, device=embeddings.weight.device)[None] % embeddings.num_embeddings
        other = torch.cat([tokens[:, :-1], tokens[:, :1]], dim=1)
        try:
            theirs = model.hf(tokens, use_cache=False).logits
            logits, changed = model(tokens), model(other)
            model.hf.generate(tokens, generation_config=GenerationConfig(max_new_tokens=2))
        except Exception as error:  # of any type: so many models
            why = shortened(describe(error), 300)
            raise ValueError(f"{it} cannot be computed: {why}.") from error
        bound = _TOLERANCES.get(logits.dtype, 5e-2) * theirs.abs().max()
        for gap, fault in (
            (logits - theirs, "its logits do not follow from its hidden states"),
            ((changed - logits)[:, :-1], "a token changes the logits of those before it"),
        ):
            if not gap.abs().max() <= bound:
                raise ValueError(f"{it} cannot be trained: {fault}.")

    def read(self, checkpointer: Any, node: Any) -> dict[str, Tensor]:
        hf, names, folder = self._model.hf, self._model.names, checkpointer._checkpoint_dir
        try:
            with torch.device("cpu"), only_errors():
                whole, told = type(hf).from_pretrained(
                    folder,
                    config=copy.deepcopy(hf.config),
                    dtype=hf.dtype,
                    key_mapping=names or None,
                    local_files_only=True,
                    output_loading_info=True,
                )
        except Exception as error:  # of any type: each format has its own
            raise ValueError(
                f"checkpoint_dir={folder}: transformers cannot read its weights: "
                f"{shortened(describe(error), 300)}. Fetch the model again."
            ) from error
        odd = {"missing": told["missing_keys"], "of another size": told["mismatched_keys"]}
        if not names:  # else they are of other parts
            odd["unexpected"] = told["unexpected_keys"]
        found = [f"{name} is {what}" for what, those in odd.items() for name in sorted(those)]
        if found:
            raise ValueError(
                f"checkpoint_dir={folder}: its weights do not match its config.json: "
                f"{'; '.join(found[:3])} ({len(found)} differ). Fetch the model again."
            )
        return {f"{PREFIX}{name}": value for name, value in whole.state_dict().items()}

    def write(self, checkpointer: Any, node: Any, weights: dict[str, Tensor], folder: Path) -> None:
        hf = self._model.hf
        with torch.device("meta"):
            bare = type(hf)._from_config(copy.deepcopy(hf.config), dtype=hf.dtype)
        state = {name.removeprefix(PREFIX): value for name, value in weights.items()}
        known = dict(bare.named_parameters()) | dict(bare.named_buffers())
        for tied in state.keys() - known.keys():  # which are one matrix under two names
            del state[tied]
        with only_errors():
            bare.save_pretrained(folder, state_dict=state)

    def peft_modules(self, names: Iterable[str], hf_config: Any) -> Iterator[PeftModule]:
        for name in sorted(names):
            theirs = name.removeprefix(PREFIX)
            yield theirs, theirs, [name]
