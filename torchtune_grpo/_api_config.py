"""Keyword arguments -> a config: which key a name means, and data as a node."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_grpo._api_rewards import dotpath
from torchtune_grpo.config.components import parameters
from torchtune_grpo.config.errors import Problems
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.schema import Keys
from torchtune_grpo.config.text import describe, shortened

RLDATASET = "torchtune_grpo.data.RLDataset"
_FORM = ("prompt_column", "columns", "system_prompt", "prompt_template", "chat", "prefill")
Row = Mapping[str, Any]


@dataclass
class Arguments:
    """What a caller gives, put into a config; mistakes are noted, with names as they were given.

    Args:
        cfg (DictConfig): is changed.
    """

    cfg: DictConfig
    problems: Problems = field(default_factory=Problems)
    _written: dict[str, str] = field(default_factory=dict)  # key -> as the caller calls it

    def set_keys(self, given: Mapping[str, Any]) -> None:
        """Sets keys: ``loss_kl_coeff=0.0``, ``loss={"kl_coeff": 0.0}``, ``loss=MyLoss``."""
        own = {*GRPOConfig.model_fields}
        for name, value in sorted(given.items(), key=lambda item: item[0] not in own):
            with self.problems.noted():
                key = name if name in own else self._key(name)
                self.put(key, value, written=name)

    def put(self, key: str, value: Any, *, written: str, whole: bool = False) -> None:
        """Sets one key; of a node, only what is given, unless it is a ``whole`` one.

        Raises:
            ValueError: if the value cannot stand in a config.
        """
        self._written[key] = written
        now = OmegaConf.select(self.cfg, key, throw_on_missing=False)
        plain = _plain(value, written)
        try:
            if isinstance(now, DictConfig) and isinstance(plain, Mapping):
                same = plain.get("_component_", now.get("_component_")) == now.get("_component_")
                merge = same and not whole
                OmegaConf.update(self.cfg, key, plain, merge=merge, force_add=True)
                return
            if isinstance(now, DictConfig) and isinstance(plain, str) and "_component_" in now:
                key += "._component_"
            OmegaConf.update(self.cfg, key, plain, merge=False, force_add=True)
        except OmegaConfBaseException as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"{written}={shortened(repr(value))}: {why}.") from error

    def form_alike(self, key: str, other: str) -> None:
        """Gives one data set the form of another's prompts, where it is not given its own."""
        like, node = self.cfg[key], self.cfg.get(other)
        if isinstance(node, DictConfig) and like.get("_component_") == node.get("_component_"):
            for name in _FORM:
                if name in like and name not in node:
                    node[name] = like[name]

    def told(self, problems: Iterable[str]) -> list[str]:
        """Problems of a config with its keys as the caller calls them."""
        longest_first = sorted(self._written.items(), key=lambda item: -len(item[0]))
        told = []
        for problem in problems:
            for key, written in longest_first:
                rest = problem.removeprefix(key)
                if rest != problem and rest[:1] in tuple("=:.[ "):
                    problem = written + rest
                    break
            told.append(problem)
        return told

    def _key(self, name: str) -> str:
        """The key below a node that a name means, as ``loss_kl_coeff``; of two, the longer node's.

        Raises:
            ValueError: if there is none; it names the nearest.
        """
        known: dict[str, str] = {}
        hints = {name: field.annotation for name, field in GRPOConfig.model_fields.items()}
        for node in sorted(hints, key=len):
            names, is_open = self._arguments(node, hints[node])
            known |= {f"{node}_{argument}": f"{node}.{argument}" for argument in names}
            if is_open and name.startswith(f"{node}_"):
                known.setdefault(name, f"{node}.{name.removeprefix(f'{node}_')}")
        if name in known:
            return known[name]
        near = difflib.get_close_matches(name, [*hints, *known, "data", "eval_data", "config"], n=1)
        raise ValueError(
            f"{name}: unknown key."
            + (f" Did you mean {near[0]}?" if near else "")
            + " `torchtune-grpo config` lists the keys."
        )

    def _arguments(self, node: str, hint: Any) -> tuple[set[str], bool]:
        """The keys below a key, and whether it takes any other."""
        if isinstance(hint, type) and issubclass(hint, Keys):
            return {*hint.model_fields}, False
        there = OmegaConf.select(self.cfg, node, throw_on_missing=False)
        if not isinstance(there, DictConfig):
            return set(), False
        found = parameters(there.get("_component_")) or {}
        named = {n for n, p in found.items() if p.kind is not p.VAR_KEYWORD}
        is_open = len(named) < len(found)
        return named | {str(name) for name in there if name != "_component_"}, is_open


def _plain(value: Any, written: str) -> Any:
    """A value as a config holds it: classes and functions by their dotpath.

    Raises:
        ValueError: for one that no config can hold.
    """
    if isinstance(value, (DictConfig, ListConfig)):
        return OmegaConf.to_container(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{written}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{written}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy's numbers, of which some are Python's, too, and arrays
        return _plain(value.tolist(), written)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        path = dotpath(value)
        if path is None:
            raise ValueError(
                f"{written}={shortened(repr(value))}: a config cannot name it; move it into a "
                "module, and import it from there."
            )
        return path
    raise ValueError(f"{written}={shortened(repr(value))}: a config cannot hold it.")


def data_node(data: Any, written: str) -> tuple[dict[str, Any], Sequence[Row] | None]:
    """Data as a node of a config, and rows that have to be written for its ``source``.

    Raises:
        ValueError: if it is nothing that can be read.
    """
    if isinstance(data, (Mapping, DictConfig)) and "_component_" in data:
        return _plain(data, written), None
    if isinstance(data, (str, Path)):
        path = Path(data)
        source = str(path.absolute() if path.exists() else data)
        return {"_component_": RLDATASET, "source": source}, None
    return {"_component_": RLDATASET}, rows_of(data, written)


def rows_of(data: Any, written: str) -> Sequence[Row]:
    """Rows in memory, all with the same columns.

    Raises:
        ValueError: if they are none.
    """
    if isinstance(data, datasets.Dataset):
        return list(data)
    what = f"{written}={shortened(repr(data))}"
    if isinstance(data, datasets.DatasetDict):
        raise ValueError(f"{what}: give one of its splits, {', '.join(data)}.")
    if not isinstance(data, (list, tuple)):
        raise ValueError(
            f"{what}: is no data; give a list of dicts, a datasets.Dataset, the path of a file or "
            "of a saved data set, a name on the hub, or a node of a config with _component_."
        )
    if not data:
        raise ValueError(f"{written}: holds no rows.")
    for number, row in enumerate(data):
        if (
            not isinstance(row, Mapping)
            or row.keys() != data[0].keys()
            or not all(isinstance(name, str) for name in row)
        ):
            raise ValueError(
                f"{written}: row {number} is {shortened(repr(row))}; "
                "give dicts with the same keys, all of them texts."
            )
    return data


def write_rows(rows: Sequence[Row], path: Path, written: str) -> None:
    """Writes rows in a format that keeps their types.

    Raises:
        ValueError: if a column cannot be stored.
    """
    for name in rows[0]:
        try:
            pyarrow.array([row[name] for row in rows])
        except (pyarrow.ArrowException, OverflowError, UnicodeError) as error:
            raise ValueError(f"{written}: the column {name!r}: {describe(error)}") from error
    table = pyarrow.Table.from_pylist([dict(row) for row in rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        pyarrow.parquet.write_table(table, path)
    except pyarrow.ArrowException as error:  # an empty dict, say; it names the column
        path.unlink(missing_ok=True)
        raise ValueError(f"{written}: {describe(error)}") from error
