"""Reads rows from wherever they are, with errors that name the config key."""

from __future__ import annotations

import glob
import gzip
import importlib
import inspect
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.utils
from datasets import Dataset, DatasetDict, DownloadManager, load_dataset, load_from_disk

from torchtune_grpo.config.text import describe, shortened

_FORMATS = ("json", "csv", "parquet", "arrow", "text")
# What people call these formats, and how their files' names end.
_FORMAT_OF = {name: name for name in _FORMATS} | {
    **{"jsonl": "json", "ndjson": "json", "jsonlines": "json"},
    **{"tsv": "csv", "pq": "parquet", "txt": "text"},
}
_LOGGER = logging.getLogger("datasets")


class _NoJsonObject(ValueError):
    """A line of a file is no JSON object."""


def load_rows(source: Any, *, split: str, **load_dataset_kwargs: Any) -> Iterable[Any]:
    """Loads the rows of one split; the arguments are those of :class:`RLDataset`.

    What has no named splits is the split that is asked for, whatever its name.

    Raises:
        ValueError: if the data set, a file or the split does not exist or cannot be read.
    """
    kwargs = load_dataset_kwargs
    name = re.match(r"\w+", split) if isinstance(split, str) else None
    if name is None:
        raise ValueError(
            f"split={split!r}: names no split. Set it to one such as train or train[:100]."
        )
    if not isinstance(source, str | Dataset | DatasetDict):
        raise ValueError(
            f"source={shortened(repr(source))}: is neither a path, nor a name on the hub, nor a "
            "datasets.Dataset. From Python, give a list as rows."
        )
    kind, where = source_kind(source), described(source, kwargs.get("data_files"))
    if kind in _FORMATS:
        _check_files(source, kind, kwargs)
        if "data_files" in kwargs:
            kwargs["data_files"] = _by_split(kwargs["data_files"], name=name.group())
    try:
        with _quiet():
            if kind == "rows":
                return _split_of(source, split, name=name.group())
            if kind == "saved":
                return _split_of(load_from_disk(source), split, name=name.group())
            if kind == "json" and (files := _local_json(kwargs)):
                tables = {n: _read_json(paths, kwargs) for n, paths in files.items()}
                return _split_of(tables, split, name=name.group())
            if kind in ("parquet", "arrow"):  # which `datasets` reads unpacked alone
                for paths in kwargs.get("data_files", {}).values():
                    paths[:] = [DownloadManager().extract(p) if _is_gz(p) else p for p in paths]
            loaded = load_dataset(kind if kind in _FORMATS else source, split=split, **kwargs)
    except Exception as error:  # of any kind: parsers, the file system, the network, their bugs
        raise ValueError(_explain(error, where, split, is_remote=kind == "hub")) from error
    if not isinstance(loaded, Dataset):
        raise ValueError(
            f"{where}: gave a {type(loaded).__name__}, but rows must be at hand "
            "to be shuffled and counted. Remove the key streaming."
        )
    if kind == "csv" and re.search(r"[;\t|]", "".join(loaded.column_names[:1])):
        raise ValueError(
            f"{where}: its columns are not parted by commas: "
            f"{shortened(repr(loaded.column_names[0]))}. Set sep, to ';' or \"\\t\", say."
        )
    return loaded


def source_kind(source: Any) -> str:
    """What a data set's ``source`` is: a format of files, ``saved``, ``hub`` or ``rows``."""
    if not isinstance(source, str):
        return "rows"
    folder = Path(source)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return "saved"
    said = _FORMAT_OF.get(source) or (None if folder.is_dir() else _format_of(source))
    return said or "hub"


def described(source: Any, data_files: Any = None) -> str:
    """Where rows come from, in terms of the config."""
    if data_files:
        return f"data_files={data_files!r}"
    if source is None:
        return "rows"
    return f"source={source!r}" if isinstance(source, str) else f"source={type(source).__name__}"


def loader_keys(source: Any) -> set[str]:
    """What ``datasets.load_dataset`` takes for a format of files, or on the hub for any."""
    kind = source_kind(source)
    if kind in ("rows", "saved"):
        return set()
    keys = {*inspect.signature(datasets.load_dataset).parameters} - {"path", "config_kwargs"}
    for name in [kind] if kind in _FORMATS else _FORMATS:
        module = importlib.import_module(f"datasets.packaged_modules.{name}.{name}")
        options = getattr(module, name.capitalize()).BUILDER_CONFIG_CLASS
        keys |= {field.name for field in fields(options)}
    return keys


def _check_files(source: str, kind: str, kwargs: dict[str, Any]) -> None:
    """Completes the arguments for local files.

    Raises:
        ValueError: if there is no such file, or its name says another format.
    """
    if source not in _FORMAT_OF:
        if kwargs.get("data_files"):
            raise ValueError(
                f"source={source!r}: is a file, and data_files={kwargs['data_files']!r} names "
                "another. Remove one."
            )
        kwargs["data_files"] = source
    data_files = kwargs.get("data_files")
    where = described(source, data_files if source in _FORMAT_OF else None)
    if not (data_files or kwargs.get("data_dir")):
        raise ValueError(
            f"data_files={data_files!r}: source={source} reads local files. "
            "Set data_files to the path of the file."
        )
    said = None
    if isinstance(data_files, str):
        said = _format_of(data_files)
        if Path(data_files).is_dir():
            raise ValueError(
                f"{where}: is a folder. Name the files in it, as in "
                f"'{data_files.rstrip('/')}/*.{source}'."
            )
        if glob.has_magic(data_files) and not ("://" in data_files or _matching(data_files)):
            raise ValueError(f"{where}: matches no file. Correct the path.")
    if said not in (None, kind, "text") and kind != "text":
        raise ValueError(f"source={source!r}: by its name, {where} is {said}. Set source={said}.")
    if kind == "csv":
        tabs = isinstance(data_files, str) and ".tsv" in Path(data_files).suffixes
        if tabs and "delimiter" not in kwargs:  # another name of sep
            kwargs.setdefault("sep", "\t")
        kwargs.setdefault("keep_default_na", False)  # which makes null of the text "None"


def _format_of(path: str) -> str | None:
    """The format that a file's name stands for; compressed files are named .jsonl.gz, say."""
    suffixes = [suffix[1:].lower() for suffix in Path(path).suffixes]
    return next((_FORMAT_OF[name] for name in reversed(suffixes) if name in _FORMAT_OF), None)


def _by_split(data_files: Any, *, name: str) -> dict[str, list[str]]:
    splits = data_files if isinstance(data_files, Mapping) else {name: data_files}
    return {k: [paths] if isinstance(paths, str) else [*paths] for k, paths in splits.items()}


def _matching(pattern: str) -> list[str]:
    """The files of a name, which may hold a pattern's characters itself."""
    return [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))


def _is_gz(path: str) -> bool:
    return path.endswith(".gz") and Path(path).is_file()


def _split_of(tables: Any, split: str, *, name: str) -> Iterable[Any]:
    """The rows of a split, or of slices and sums of splits, out of a table or one for each name."""
    if not isinstance(tables, Mapping):
        tables = {name: tables}
    lengths = {name: len(table) for name, table in tables.items()}
    slices = [
        (tables[part.splitname], range(lengths[part.splitname])[part.from_ : part.to])
        for part in datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    ]
    return chain.from_iterable(
        table.select(rows) if isinstance(table, Dataset) else (table[row] for row in rows)
        for table, rows in slices
    )


def _local_json(kwargs: Mapping[str, Any]) -> dict[str, list[str]] | None:
    """Split -> local files, if all that is asked for is to read them as they are.

    ``datasets`` would make times of texts such as "2024-01-02", and floats of integers beside
    floats, and fails at integers beyond 64 bits.
    """
    if not {*kwargs} <= {"data_files", "encoding", "field"}:
        return None
    files = {
        split: [*chain(*(_matching(name) if glob.has_magic(name) else [name] for name in names))]
        for split, names in kwargs["data_files"].items()
    }
    packed = (".zip", ".bz2", ".xz", ".zst", ".lz4", ".7z")
    paths = chain.from_iterable(files.values())
    return None if any("://" in path or path.endswith(packed) for path in paths) else files


def _read_json(paths: Sequence[str], kwargs: Mapping[str, Any]) -> list[Any]:
    """The rows of files of JSON lines or of one JSON list; what a row lacks is None."""
    rows: list[Any] = []
    for path in paths:
        with open(path, "rb") as raw:
            unpack: Any = gzip.open if raw.read(2) == b"\x1f\x8b" else open
        encoding = kwargs.get("encoding") or "utf-8"
        with unpack(path, "rt", encoding="utf-8-sig" if encoding == "utf-8" else encoding) as file:
            start = file.read(1)
            while start.isspace():
                start = file.read(1)
            field = kwargs.get("field")
            if start == "[" or field is not None:
                content = json.loads(start + file.read())
                rows += content if field is None else content[field]
            else:
                lines = chain([start + file.readline()], file)
                rows += [_json_object(x, n, path) for n, x in enumerate(lines, 1) if x.strip()]
    names = dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row)
    return [
        {name: row.get(name) for name in names}
        if isinstance(row, dict) and row.keys() != names.keys()
        else row
        for row in rows
    ]


def _json_object(line: str, number: int, path: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise _NoJsonObject(f"line {number} of {path} is no JSON object: {shortened(line)}")
    return content


def _explain(error: Exception, where: str, split: str, *, is_remote: bool) -> str:
    """What went wrong, in terms of the config, in one line."""
    cause = error.__cause__ or error
    detail = shortened(str(cause) if isinstance(cause, OSError) else describe(cause), 300)
    if "Unknown split" in detail:
        return f"split={split!r}: is not in {where}. {shortened(str(cause), 300)}"
    if (
        isinstance(error, StopIteration)
        or "corresponds to no data" in detail
        or "No columns to parse" in detail
    ):
        return f"{where}: split {split!r} holds no rows. Give a data set with at least one row."
    if isinstance(error, FileNotFoundError) and not is_remote:
        return f"{where}: not found. {detail}. Correct the path."
    if isinstance(error, ConnectionError):
        return (
            f"{where}: cannot be loaded from the hub: {detail}. Without a network, "
            "download the files elsewhere, and set source to the path of the file."
        )
    if isinstance(cause, UnicodeError):
        return f"{where}: is not in UTF-8. Set encoding, to latin-1, say."
    if isinstance(error, _NoJsonObject):
        return (
            f"{where}: {shortened(str(error), 300)}. Correct or remove the line; if the rows are a "
            "list in one object, set source=json, data_files and field to the list's name."
        )
    return f"{where}, split={split!r}: cannot be loaded: {detail}. Correct the file or these keys."


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the loaders' bars, and errors that are raised anyway, off the terminal.

    It leaves the user's own settings as they were.
    """
    with ExitStack() as restore:
        restore.callback(_LOGGER.setLevel, _LOGGER.level)
        _LOGGER.setLevel(logging.CRITICAL)
        for library in (datasets.utils, huggingface_hub.utils):
            if not library.are_progress_bars_disabled():
                library.disable_progress_bars()
                restore.callback(library.enable_progress_bars)
        yield
