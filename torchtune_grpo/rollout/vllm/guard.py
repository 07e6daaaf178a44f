"""The proof that vLLM samples from the trainer's policy: by its weights and by its samples.

In bf16, rounding explains larger differences of log-probs than weights that are a few steps old. So
the weights are compared, too: the bits of some columns of each matrix, and of all norms and biases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torchtune.modules import TransformerDecoder

from torchtune_grpo.machine.parallel import reshard
from torchtune_grpo.models.adapter import adapter_names
from torchtune_grpo.models.layers import unembed_with
from torchtune_grpo.models.weights import parts_by_hf_name
from torchtune_grpo.rollout.linear import KINDS, whole_weight
from torchtune_grpo.rollout.request import RolloutRequest, explained_by_rounding
from torchtune_grpo.rollout.sampling import mix
from torchtune_grpo.trajectory import Samples

ROWS, TOKENS = 4, 64  # whose log-probs the trainer computes, too: rows, and most tokens of each
COLUMNS = 16  # of a matrix, spread over its width
ANOTHER_POLICY = (
    "vLLM samples from another policy than the trainer's. Nothing of this step is saved. Set "
    "rollout.engine to native; resume_from_checkpoint=True goes on with a run."
)
_OF_IDS = ("model.embed_tokens.weight", "lm_head.weight")  # a row for each id


class PolicyWeights:
    """A policy's weights under the hub's names, with adapters merged."""

    def __init__(self, model: TransformerDecoder, model_dir: str) -> None:
        modules, adapters = dict(model.named_modules()), adapter_names(model)
        # A parameter's name -> its module, and its name there
        places = {
            name: (modules[name.rpartition(".")[0]], name.rpartition(".")[2])
            for name, _ in model.named_parameters()
            if name not in adapters
        }
        parts = parts_by_hf_name(places, model_dir)
        self._sources = {theirs: [places[name] for name in ours] for theirs, ours in parts.items()}
        self.dtype = model.tok_embeddings.weight.dtype
        self.bytes = sum(getattr(*at).numel() for at in places.values()) * self.dtype.itemsize

    def named(self, *, vocab: int) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, each made when it is needed, for ids below ``vocab``."""
        for theirs in self._sources:
            yield theirs, self._made(theirs, vocab)

    def untied(self, *, vocab: int) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, the head's too where it is the embeddings."""
        yield from self.named(vocab=vocab)
        embeddings, head = _OF_IDS
        if head not in self._sources:
            yield head, self._made(embeddings, vocab)

    def _made(self, theirs: str, vocab: int) -> Tensor:
        parts = [self._weight(*place).detach().to(self.dtype) for place in self._sources[theirs]]
        weight = torch.cat(parts) if len(parts) > 1 else parts[0]
        return weight[:vocab] if theirs in _OF_IDS else weight

    def _weight(self, module: object, name: str) -> Tensor:
        if name == "weight" and isinstance(module, KINDS):
            return whole_weight(module, merge=True)
        parameter: Tensor = getattr(module, name)
        return parameter

    def checksums(self, *, vocab: int) -> set[int]:
        """Return the checksums that vLLM's weights should have.

        There is one for each matrix with a row for each id, as its head may be its embeddings, and
        one for all other weights together, as it joins some of them.
        """
        sums = {
            name: _sum(weight[:, _columns(weight.shape[1])] if weight.dim() > 1 else weight)
            for name, weight in self.named(vocab=vocab)
        }
        of_ids = {sums.pop(name) for name in _OF_IDS if name in sums}
        return of_ids | {_joined(sums.values())}


def vllms_checksums(model: nn.Module) -> set[int]:
    """Return the checksums of the weights that a model of vLLM's computes with.

    They are taken from its products with unit vectors: on a CPU the matrices themselves are packed,
    and only products can read them.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    dtype = next(weight.dtype for weight in model.parameters() if weight.numel())
    of_ids = set[int]()
    others = [_sum(weight.to(dtype)) for weight in model.parameters() if weight.dim() == 1]
    for module in model.modules():
        if isinstance(module, LinearBase):
            others.append(_sum(_product(module, module.input_size, dtype)))
        elif isinstance(module, VocabParallelEmbedding):
            width, known = module.embedding_dim, module.org_vocab_size  # others are padding
            of_ids.add(_sum(_product(module, width, dtype)[:known]))
            of_ids.add(_sum(module.weight[:known, _columns(width)]))
    return of_ids | {_joined(others)}


def _columns(width: int) -> Tensor:
    return torch.linspace(0, width - 1, COLUMNS).long()


def _product(module: Any, width: int, dtype: torch.dtype) -> Tensor:
    """Return columns of the matrix that a module multiplies with: [out, COLUMNS]."""
    units = torch.zeros(COLUMNS, width, dtype=dtype, device=module.weight.device)
    units[range(COLUMNS), _columns(width)] = 1
    products: Tensor = module.quant_method.apply(module, units)
    return products.t()


def _sum(weights: Tensor) -> int:
    """Sum the mixed bits of weights, in any order."""
    weights = (weights + 0.0).contiguous()  # no -0.0, which products lose
    return int(
        mix(weights.view(torch.int16 if weights.itemsize == 2 else torch.int32).long()).sum()
    )


def _joined(sums: Iterable[int]) -> int:
    return sum(sums) % 2**64


class Guard:
    """Raises a ValueError if samples were not drawn from the policy that is trained.

    A rollout is held against the trainer's log-probs of some rows, and a step against those of all
    rows, which training computes anyway.
    """

    def __init__(self, model: TransformerDecoder) -> None:
        self._model = model
        self._kind, self._bound = explained_by_rounding(model.tok_embeddings.weight.dtype)
        self._coolness = 1.0  # the last rollout's temperature divides differences, too
        self._unknown = 0.0  # log-prob that the trainer has for ids that vLLM leaves out

    def compare(self, request: RolloutRequest, samples: Samples, *, vocab: int) -> None:
        """Hold rows of several groups against the trainer's log-probs of their sampled tokens."""
        temperature = request.params.temperature or 1.0
        self._coolness = max(1.0, 1 / temperature)
        rows = _longest(samples, group_size=request.group_size)
        prompts = [request.prompts[row // request.group_size] for row in rows]
        responses, theirs = samples.responses[rows, :TOKENS], samples.sampler_logprobs[rows]
        at = samples.sampled[rows, :TOKENS].nonzero().unbind(1)
        logits = self._logits(prompts, responses, at=at) / temperature  # [K, V]
        known = logits[:, :vocab].logsumexp(dim=-1)
        own = logits.gather(1, responses[at][:, None])[:, 0] - known
        if not len(own):
            return
        unknown, gaps = logits.logsumexp(dim=-1) - known, (own - theirs[at]).abs()
        reduced = torch.max if self._kind == "max" else torch.mean
        self._unknown = float(reduced(unknown))
        spare = 0.0 if self._kind == "max" else 1 / len(gaps)  # in bf16 one may be off by 1
        self._judge(float(reduced(gaps)) - spare)

    def check_step(self, metrics: Mapping[str, float]) -> None:
        """Judge a step after its rollout; the trainer's log-probs are over all ids."""
        gap = metrics.get(f"sampling/sampling_logp_difference/{self._kind}", 0.0)
        self._judge(gap - 2 * self._unknown)  # of other tokens it may be more

    def _logits(
        self, prompts: Sequence[Sequence[int]], responses: Tensor, *, at: Sequence[Tensor]
    ) -> Tensor:
        """Compute float32 logits [K, V] of the tokens ``at`` rows and columns; on every rank."""
        model, device = self._model, responses.device
        pairs = zip(prompts, responses.tolist(), strict=True)
        texts = [torch.tensor([*prompt, *response], device=device) for prompt, response in pairs]
        before = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        where = at[0], before[at[0]] + at[1]
        with unembed_with(model, lambda h: TransformerDecoder.unembed(model, h[where][None])):
            logits: Tensor = model(pad_sequence(texts, batch_first=True))[0].float()
        reshard(model)
        return logits

    def _judge(self, gap: float) -> None:
        bound = self._bound * self._coolness
        if not gap <= bound:  # NaN, too
            raise ValueError(
                f"rollout.engine=vllm: the {self._kind} difference between the trainer's log-probs "
                f"of samples and vLLM's is {gap:.3g}; rounding explains {bound}. {ANOTHER_POLICY}"
            )


def _longest(samples: Samples, *, group_size: int) -> list[int]:
    """Return the rows of the longest responses of groups spread over a rollout.

    They are as many on all ranks, as sharding needs: one may come twice.
    """
    longest = samples.lengths.view(-1, group_size).argmax(dim=1).tolist()
    chosen = [n * len(longest) // ROWS for n in range(ROWS)]
    return [n * group_size + longest[n] for n in chosen]
