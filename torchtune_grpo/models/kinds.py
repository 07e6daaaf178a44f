"""What the rest of the package asks about a model, beside what it computes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torchtune import training
from torchtune.modules import TransformerDecoder

from torchtune_grpo.config.text import read_json
from torchtune_grpo.models.families import FAMILIES
from torchtune_grpo.models.layers import reorder

# torchtune's model types whose weights its checkpointers leave in Hugging Face's order of rows
_UNPERMUTED = ("QWEN2", "PHI3_MINI", "PHI4")
PeftModule = tuple[str, str, list[str]]  # its name in transformers, in target_modules, and in ours


class ModelKind:
    """Models of torchtune's modules, which declare nothing; any other has its own as ``kind``.

    A checkpointer's ``node`` is that in the config.
    """

    modules = "torchtune"  # whose compute it; engines declare whose they sample
    packs_rows = True  # it takes ``Segments`` as a mask

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model

    def shape(self) -> dict[str, int]:
        """Return the sizes that config.json must agree with, by its keys."""
        embeddings, layers = self._model.tok_embeddings, self._model.layers
        shape = {"vocab_size": embeddings.num_embeddings, "hidden_size": embeddings.embedding_dim}
        for layer in list(layers)[:1]:
            shape["num_attention_heads"] = layer.attn.num_heads
            shape["num_key_value_heads"] = layer.attn.num_kv_heads
        return shape | {"num_hidden_layers": len(layers)}

    def check_loaded(self) -> None:
        """Raise a ValueError if the model cannot be trained with the weights that it now has."""

    def read(self, checkpointer: Any, node: Any) -> dict[str, Tensor]:
        """Load a checkpointer's weights with the model's names, in Hugging Face's row order."""
        weights: dict[str, Tensor] = checkpointer.load_checkpoint()[training.MODEL_KEY]
        return reorder(weights, hf_config_of(node), to="halves") if _reorders(node) else weights

    def write(self, checkpointer: Any, node: Any, weights: dict[str, Tensor], folder: Path) -> None:
        """Reverse ``read``: write to ``folder``, which the checkpointer calls ``epoch_0``."""
        weights = reorder(weights, hf_config_of(node), to="pairs") if _reorders(node) else weights
        checkpointer.save_checkpoint({training.MODEL_KEY: weights}, epoch=0)

    def peft_modules(self, names: Iterable[str], hf_config: Any) -> Iterator[PeftModule]:
        """Yield modules that may be adapted, among them all of these names."""
        # A type that only torchtune builds has Llama's names.
        family = FAMILIES.get(hf_config.get("model_type"), FAMILIES["llama"])
        for layer in sorted({re.match(r"(layers\.\d+\.)?", name)[0] for name in names}):  # type: ignore[index]
            for theirs, ours in family.parts.items():
                whole = f"{layer and 'model.'}{layer}{theirs}"
                yield whole, theirs.rpartition(".")[2], [f"{layer}{name}" for name in ours]


def kind_of(model: nn.Module) -> ModelKind:
    """Return what a model declares, or the kind of torchtune's modules."""
    if isinstance(model, TransformerDecoder):
        return ModelKind(model)
    declared: ModelKind | None = getattr(model, "kind", None)
    if declared is None:
        raise ValueError(
            f"model: its component makes a {type(model).__name__}; only text models (torchtune's "
            "TransformerDecoder, or those of torchtune_grpo.models) can be trained."
        )
    return declared


def hf_config_of(node: Any) -> dict[str, Any]:
    """Read ``config.json`` from the folder that a checkpointer's node names."""
    return read_json(node["checkpoint_dir"], "config.json", key="checkpointer.checkpoint_dir")


def _reorders(node: Any) -> bool:
    """Whether a checkpointer has the rows in torchtune's order; ours has no model_type."""
    return node.get("model_type") not in (*_UNPERMUTED, None)
