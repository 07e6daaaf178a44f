"""The memory that an update takes, and what ``auto`` means for its keys."""

from __future__ import annotations

from bisect import bisect_right

from torch import nn
from torchtune import utils
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import get_adapter_params

from torchtune_grpo.config.keys import GRPOConfig

log = utils.get_logger("INFO")

# Share of the free memory for the update's activations. A rollout takes 0.4, and 10 to 15 % of the
# memory is lost between the allocator's blocks.
_SHARE = 0.5
_NORM_NUMBERS = 6  # that a norm keeps of each number, if torch has no kernel for all of it
_HEAD_BYTES = 20  # of a token, times the model's width: hidden states around the output projection
_LOGITS_BYTES = 2**28  # blocks of logits and their gradients


def pass_bytes(model: TransformerDecoder, *, tokens: int, recompute: bool) -> int:
    """Estimate what a forward and backward pass takes, beside weights and their gradients.

    A layer keeps about as many numbers as its linear layers read and write, and those of its norms.
    With ``recompute`` it keeps only its input, and the rest is there for one layer at a time. It is
    rather too much than too little.
    """
    width, layers = model.tok_embeddings.embedding_dim, len(model.layers)
    layer = max(model.layers, key=_linear_numbers)
    attention, of_heads = getattr(layer, "attn", None), 0
    if attention is not None and getattr(attention, "q_norm", None) is not None:
        of_heads = (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    of_layer = _linear_numbers(layer) + _NORM_NUMBERS * (2 * width + of_heads)
    numbers = layers * width + of_layer if recompute else (layers + 1) * of_layer
    size = model.tok_embeddings.weight.itemsize
    return tokens * (numbers * size + _HEAD_BYTES * width) + _LOGITS_BYTES


def _linear_numbers(layer: nn.Module) -> int:
    """Count what a layer's linear modules read and write of a token; of all experts at once."""
    adapters = {id(parameter) for parameter in get_adapter_params(layer).values()}
    shapes = [p.shape[-2:] for p in layer.parameters() if p.dim() > 1 and id(p) not in adapters]
    return sum(map(sum, shapes))


def choose_passes(
    cfg: GRPOConfig, model: TransformerDecoder, *, longest: int, free: int | None
) -> GRPOConfig:
    """Return the config with what fits into ``free`` bytes in place of ``auto``.

    Layers are recomputed if a pass of the config's size, or of one group if that is ``auto``, would
    not fit otherwise. Then a pass takes as many rows, of ``longest`` tokens, as fit. Where the free
    memory is not known (None), layers are recomputed, and a pass takes one group.
    """
    rows, recompute = cfg.forward_batch_size, cfg.enable_activation_checkpointing
    most, room = cfg.batch_size * cfg.grpo_samples, 0 if free is None else _SHARE * free
    if recompute == "auto":
        at_once = min(most, cfg.grpo_samples if rows == "auto" else rows or most)
        recompute = pass_bytes(model, tokens=at_once * longest, recompute=False) > room
    if rows == "auto":
        sizes = range(longest, (most + 1) * longest, longest)  # of a pass of 1 row, 2 rows, ...
        fits = bisect_right(
            sizes, room, key=lambda n: pass_bytes(model, tokens=n, recompute=recompute)
        )
        rows = cfg.grpo_samples if free is None else max(fits, 1)
    chosen = f"enable_activation_checkpointing={recompute} forward_batch_size={rows}"
    utils.log_rank_zero(log, f"For the memory that is free, auto is {chosen}.")
    return cfg.replace(forward_batch_size=rows, enable_activation_checkpointing=recompute)
