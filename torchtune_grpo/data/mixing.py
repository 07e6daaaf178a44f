"""Several data sets as one, whose prompts take turns by weight."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
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

    ``datasets`` holds nodes by name. Rows get a column ``dataset`` with that name, and None in each
    column that only other data sets have.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, *, datasets: Mapping[str, Mapping[str, object]]
    ) -> None:
        if not datasets:
            raise ValueError("datasets: there is none; give components by name.")
        weights = []
        self.parts: dict[str, RLDataset] = {}
        for name, given in datasets.items():
            key, node = f"datasets.{name}", OmegaConf.create(dict(given))
            if "_component_" not in node:
                raise ValueError(
                    f"{key}: has no _component_, such as torchtune_grpo.data.RLDataset."
                )
            weights.append(node.pop("weight", 1.0))
            if not (isinstance(weights[-1], (int, float)) and 0 < weights[-1] < math.inf):
                raise ValueError(f"{key}.weight={weights[-1]!r}: give a number above 0.")
            check_component(key, node)
            self.parts[name] = instantiate(key, node, tokenizer)
        self.shares = [weight / sum(weights) for weight in weights]  # of the prompts
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
