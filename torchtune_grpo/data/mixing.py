"""Several data sets as one, whose prompts take turns by weight."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

from omegaconf import OmegaConf
from torch.utils.data import Dataset
from torchtune.modules.transforms.tokenizers import ModelTokenizer

from torchtune_grpo.config.check import check_component, instantiate
from torchtune_grpo.data.chat import PromptEncoder
from torchtune_grpo.data.dataset import Item, RLDataset, Row, Rule
from torchtune_grpo.data.load import digest

NAME_COLUMN = "dataset"  # which of the data sets a prompt is from


class MixedDataset(Dataset[Item]):
    """Data sets one after the other; ``MixedSampler`` draws from each as its ``weight`` says.

    A weight may change: ``{0: 1, 50: 0}`` is 1 in the first 50 steps and 0 from then on.
    ``datasets`` holds nodes by name. Rows get a column ``dataset`` with that name, and None in each
    column that only other data sets have.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, *, datasets: Mapping[str, Mapping[str, object]]
    ) -> None:
        if not datasets:
            raise ValueError("datasets: there is none; give components by name.")
        weights: dict[str, dict[int, float]] = {}
        self.parts: dict[str, RLDataset] = {}
        for name, given in datasets.items():
            key, node = f"datasets.{name}", OmegaConf.create(dict(given))
            if "_component_" not in node:
                raise ValueError(
                    f"{key}: has no _component_, such as torchtune_grpo.data.RLDataset."
                )
            weights[name] = _weights(f"{key}.weight", node.pop("weight", 1.0))
            check_component(key, node)
            self.parts[name] = instantiate(key, node, tokenizer)
        self.shares = _shares(weights)
        self._columns = dict.fromkeys(c for part in self.parts.values() for c in part[0]["columns"])
        if NAME_COLUMN in self._columns:
            raise ValueError(
                f"datasets: their names are the column {NAME_COLUMN!r}, which some rows have. "
                f"Rename it: columns={{other_name: {NAME_COLUMN}}}."
            )
        self._first = next(iter(self.parts.values()))
        self.asked = self._first.asked
        self.prefill, is_chat = self._first.prefill, self._first.encoder.is_chat
        for name, part in self.parts.items():
            if part.prefill != self.prefill or part.encoder.is_chat != is_chat:
                raise ValueError(
                    f"datasets.{name}: has prefill={part.prefill!r}, chat={part.encoder.is_chat}, "
                    f"and the first one {self.prefill!r}, {is_chat}. Make them equal."
                )

    @property
    def row_numbers(self) -> list[tuple[str, int]]:
        """The data set of each position, and its row there."""
        return [(name, row) for name, part in self.parts.items() for row in part.row_numbers]

    @property
    def encoder(self) -> PromptEncoder:
        """The encoder of all prompts, which an environment needs."""
        first, *others = [part.encoder for part in self.parts.values()]
        if any(other.messages("-") != first.messages("-") for other in others):
            raise ValueError(
                "datasets: an environment needs the same system_prompt in all of them."
            )
        return first

    @property
    def digest(self) -> str:
        return digest(part.digest for part in self.parts.values())

    def item(self, prompt: object, index: int) -> Item:
        return self._first.item(prompt, index)

    def alike(self, *, source: str | None = None, rows: Iterable[Row] | None = None) -> RLDataset:
        return self._first.alike(source=source, rows=rows)

    @property
    def starts(self) -> list[int]:
        """The position at which each data set begins, and behind them the number of all prompts."""
        return [0, *accumulate(map(len, self.parts.values()))]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> Item:
        starts = self.starts
        position = range(starts[-1])[index]
        number = bisect_right(starts, position) - 1
        name = [*self.parts][number]
        start = starts[number]
        return self._shown(name, self.parts[name][position - start], start=start)

    def _shown(self, name: str, item: Item, *, start: int) -> Item:
        """Return a part's item as one of the whole."""
        columns = self._columns | item["columns"] | {NAME_COLUMN: name}
        return {**item, "index": start + item["index"], "columns": columns}

    def check(self, rule: Rule, *, where: str, **options: Any) -> None:
        """Leave out rows that a rule finds faulty, as each of the data sets does."""
        for (name, part), start in zip(self.parts.items(), self.starts, strict=False):
            own = partial(self._judged, name, rule, start=start)
            part.check(own, where=f"{where}.datasets.{name}", **options)

    def _judged(
        self, name: str, rule: Rule, items: Sequence[Item], *, start: int
    ) -> Mapping[int, str | None]:
        return rule([self._shown(name, item, start=start) for item in items])


def _weights(key: str, given: Any) -> dict[int, float]:
    """Return a data set's weight by the step from which on it has it."""
    weights = dict(given) if isinstance(given, Mapping) else {0: given}
    for step, weight in weights.items():
        is_step = isinstance(step, int) and step >= 0
        is_weight = isinstance(weight, (int, float)) and 0 <= weight < math.inf
        if not (is_step and is_weight) or not any(weights.values()):
            raise ValueError(
                f"{key}={weights if isinstance(given, Mapping) else given!r}: give a number above "
                "0, or one for each step from which on it holds, as in {0: 1, 50: 0}."
            )
    return weights


def _shares(weights: Mapping[str, Mapping[int, float]]) -> dict[int, list[float]]:
    """Return the data sets' shares of the prompts, by the step from which on they hold."""
    shares: dict[int, list[float]] = {}
    for step in sorted({0, *chain.from_iterable(weights.values())}):
        begun = [{s: w for s, w in each.items() if s <= step} for each in weights.values()]
        now = [each[max(each)] if each else 0.0 for each in begun]
        if not (total := sum(now)):
            raise ValueError(f"datasets: from step {step} on, each weight is 0; give one more.")
        shares[step] = [weight / total for weight in now]
    return shares
