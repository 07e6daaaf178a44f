"""Rows from local files, from saved data sets and from the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from datasets import Dataset, ReadInstruction, load_dataset, load_from_disk

from torchtune_grpo.config.text import describe, shortened

_FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}


def load_rows(
    source: str, *, split: str = "train", data_files: Any = None, **options: Any
) -> Iterable[Any]:
    """Load the rows of one split; files without named splits are that split, whatever its name."""
    try:
        return _load(source, split, data_files, options)
    except Exception as error:  # from parsers, the file system or the network
        cause = shortened(describe(error.__cause__ or error), 400)
        raise ValueError(f"{origin(source, data_files)}, split={split!r}: {cause}") from error


def origin(source: str, data_files: Any) -> str:
    """Name where rows come from, as the config does."""
    return f"source={source!r}" + ("" if data_files is None else f", data_files={data_files!r}")


def _load(source: str, split: str, data_files: Any, options: dict[str, Any]) -> Iterable[Any]:
    name = re.match(r"\w*", split)[0]  # type: ignore[index]  # matches any text
    if any((Path(source) / file).is_file() for file in ("state.json", "dataset_dict.json")):
        saved = load_from_disk(source, **options)
        return _select({name: saved} if isinstance(saved, Dataset) else saved, split)
    suffix = Path(source.removesuffix(".gz")).suffix.lower()
    file_format = source if source in _FORMATS.values() else _FORMATS.get(suffix)
    if file_format is None:
        return load_dataset(source, split=split, data_files=data_files, **options)
    if (source == file_format) == (data_files is None):
        raise ValueError("give the path of a file as source, or its format and data_files")
    files = source if data_files is None else data_files
    files = files if isinstance(files, Mapping) else {name: files}
    if file_format == "json":
        tables = {name: _read_json(paths, **options) for name, paths in files.items()}
        return _select(tables, split)
    if file_format == "csv":
        options.setdefault("keep_default_na", False)  # True would read the text "None" as null
        if ".tsv" in str(files):
            options.setdefault("sep", "\t")
    return load_dataset(file_format, split=split, data_files=files, **options)


class _Slices(Sequence[Any]):
    """Rows of tables, one slice after another."""

    def __init__(self, parts: Iterable[tuple[Any, int, int]]) -> None:
        self._parts = [*parts]

    def __len__(self) -> int:
        return sum(end - start for _, start, end in self._parts)

    def __getitem__(self, index: Any) -> Any:
        for table, start, end in self._parts:
            if index < end - start:
                return table[start + index]
            index -= end - start
        raise IndexError

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(islice(table, *ends) for table, *ends in self._parts)


class _JsonRows(Sequence[Any]):
    """Rows kept as JSON text: parsed, a million of them would take gigabytes.

    Columns that a row lacks are None. `datasets` is not used: it would turn a text such as
    "2024-01-02" into a time, and integers beside floats into floats.
    """

    def __init__(self) -> None:
        self._texts: list[bytes] = []
        self._names: dict[str, None] = {}

    def add(self, row: Any, text: str | None = None) -> None:
        self._texts.append((json.dumps(row) if text is None else text).encode())
        if isinstance(row, dict) and row.keys() - self._names:
            self._names |= dict.fromkeys(row)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: Any) -> Any:
        row = json.loads(self._texts[index])
        return {**dict.fromkeys(self._names), **row} if isinstance(row, dict) else row


def _select(tables: Mapping[str, Sequence[Any]], split: str) -> Sequence[Any]:
    """Select the rows of a split, or of slices and sums of splits: ``train[:90%]+test``."""
    lengths = {name: len(table) for name, table in tables.items()}
    parts = ReadInstruction.from_spec(split).to_absolute(lengths)
    return _Slices((tables[part.splitname], part.from_, part.to) for part in parts)


def _read_json(paths: Any, *, encoding: str = "utf-8-sig", field: str | None = None) -> _JsonRows:
    """Read files of JSON lines, or of one JSON list, which may be a ``field`` of the file."""
    rows = _JsonRows()
    for opened in fsspec.open_files(paths, "rt", compression="infer", encoding=encoding):
        with opened as file:
            lines = enumerate(file, 1)
            first = next(((n, line) for n, line in lines if line.strip()), (0, ""))
            if field is not None or first[1].lstrip().startswith("["):
                whole = json.loads(first[1] + file.read())
                for row in whole if field is None else whole[field]:
                    rows.add(row)
                continue
            for number, line in chain([first], lines):
                try:
                    if line.strip():
                        rows.add(json.loads(line), line)
                except ValueError as error:
                    raise ValueError(f"line {number} of the file: {error}") from None
    return rows
