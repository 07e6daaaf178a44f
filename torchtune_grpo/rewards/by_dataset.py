"""Rewards of their own for the data sets of a ``MixedDataset``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchtune_grpo.rewards.reward import make_reward


class RewardByDataset:
    """Reward that is another one for each data set: ``rewards`` holds nodes by its name.

    Rows of other data sets get None. All share the name, the weight and the format of the whole.
    """

    __name__ = "reward_by_dataset"

    def __init__(self, *, rewards: Mapping[str, Mapping[str, Any]]) -> None:
        self._rewards = {name: make_reward(node, name) for name, node in rewards.items()}
        self.decides = all(each.decides for each in self._rewards.values())
        for name, each in self._rewards.items():
            if each.workers is not None or each.is_async or each.weight != 1:
                raise ValueError(
                    f"{name}: may not be async, nor have a weight or isolation of its own; set "
                    "these beside `rewards`."
                )

    def __call__(self, *, completions: list[Any], dataset: list[str], **given: Any) -> list[Any]:
        all_given = {**given, "completions": completions, "dataset": dataset}
        scores: dict[int, Any] = {}
        for name, reward in self._rewards.items():
            rows = [row for row, each in enumerate(dataset) if each == name]
            if not rows:
                continue
            own = {
                key: [value[row] for row in rows] if isinstance(value, list) else value
                for key, value in all_given.items()
            }
            if "log_extra" in given:
                own["log_extra"] = lambda column, values, rows=rows: given["log_extra"](
                    column, _spread(dict(zip(rows, values)), len(dataset))
                )
            scores |= zip(rows, reward.function(**own), strict=True)
        return _spread(scores, len(dataset))

    def check_row(self, *, dataset: str, **row: Any) -> str | None:
        """Return what keeps a row's own reward from scoring answers to it, or None."""
        reward = self._rewards.get(dataset)
        if reward is None:
            return None
        reward.check_columns([name for name, value in row.items() if value is not None])
        return reward.row_faults([{**row, "dataset": dataset}]).get(0)

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, str | None]:
        """Find rows that a trial shows to be faulty, by position, as the rewards do."""
        faults: dict[int, str | None] = {}
        for name, reward in self._rewards.items():
            own = [row for row, each in enumerate(rows) if each["dataset"] == name]
            found = reward.check_rows([rows[row] for row in own]) if own else {}
            faults |= {own[row]: fault for row, fault in found.items()}
        return faults

    def close(self) -> None:
        """End the processes of the rewards."""
        for reward in self._rewards.values():
            reward.close()


def _spread(values: Mapping[int, Any], count: int) -> list[Any]:
    """Return the values of ``count`` rows, None for those that have none."""
    return [values.get(row) for row in range(count)]
