"""Reads the rows of a hub data set or of local files, with errors that name the config key."""

from __future__ import annotations

import glob
import importlib
import inspect
import json
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.utils
from datasets import load_dataset

from torchtune_grpo.plain import describe, shortened

# Formats of local files. Without data_files, `datasets` would take whatever lies in the folder.
FILE_FORMATS = ("json", "csv", "parquet", "arrow", "text")
# What people call these formats, and how their files' names end.
_FORMAT_OF = {name: name for name in FILE_FORMATS} | {
    **{"jsonl": "json", "ndjson": "json", "jsonlines": "json"},
    **{"tsv": "csv", "pq": "parquet", "txt": "text"},
}
_LOGGER = logging.getLogger("datasets")


def load_rows(
    source: str, *, split: str, num_samples: int | None, **load_dataset_kwargs: Any
) -> list[dict[str, Any]]:
    """Loads the rows of one split; the arguments are those of :class:`RLDataset`.

    ``data_files`` without split names holds the split that is asked for, whatever its name.

    Raises:
        ValueError: if the data set, a file or the split does not exist or cannot be read.
    """
    data_files = load_dataset_kwargs.get("data_files")
    _check_format(source, data_files, load_dataset_kwargs.get("data_dir"))
    split_name = re.match(r"\w+", split) if isinstance(split, str) else None
    if split_name is None:
        raise ValueError(
            f"split={split!r}: names no split. Set it to one such as train or train[:100]."
        )
    if data_files and not isinstance(data_files, dict):
        load_dataset_kwargs["data_files"] = {split_name.group(): data_files}
    try:
        with _quiet():
            loaded = load_dataset(source, split=split, **load_dataset_kwargs)
            if isinstance(loaded, datasets.Dataset):
                count = len(loaded) if num_samples is None else min(num_samples, len(loaded))
                rows = list(loaded.select(range(count)))
    except Exception as error:  # of any kind: parsers, the file system, the network, their bugs
        raise ValueError(_explain(error, source, split, data_files)) from error
    if not isinstance(loaded, datasets.Dataset):
        raise ValueError(
            f"source={source!r}: gave a {type(loaded).__name__}, but rows must be at hand "
            "to be shuffled and counted. Remove the key streaming."
        )
    if source == "csv" and re.search(r"[;\t|]", "".join(loaded.column_names[:1])):
        raise ValueError(
            f"data_files={data_files!r}: its columns are not parted by commas: "
            f"{shortened(repr(loaded.column_names[0]))}. Set sep, to ';' or \"\\t\", say."
        )
    return rows


def loader_keys(source: str) -> set[str]:
    """What ``datasets.load_dataset`` takes for a format of files, or on the hub for any."""
    keys = {*inspect.signature(datasets.load_dataset).parameters} - {"path", "config_kwargs"}
    for name in [source] if source in FILE_FORMATS else FILE_FORMATS:
        module = importlib.import_module(f"datasets.packaged_modules.{name}.{name}")
        options = getattr(module, name.capitalize()).BUILDER_CONFIG_CLASS
        keys |= {field.name for field in fields(options)}
    return keys


def _check_format(source: str, data_files: Any, data_dir: Any) -> None:
    """Raises a ValueError where the name of a file stands for a format, or contradicts it."""
    if source in FILE_FORMATS:
        if not (data_files or data_dir):
            raise ValueError(
                f"data_files={data_files!r}: source={source} reads local files. "
                "Set data_files to the path of the file."
            )
        if isinstance(data_files, str) and not Path(data_files).is_file():
            if Path(data_files).is_dir():
                raise ValueError(
                    f"data_files={data_files!r}: is a folder. Name the files in it, as in "
                    f"data_files='{data_files.rstrip('/')}/*.{source}'."
                )
            if glob.has_magic(data_files) and not ("://" in data_files or glob.glob(data_files)):
                raise ValueError(f"data_files={data_files!r}: matches no file. Correct the path.")
        said = _format_of(data_files) if isinstance(data_files, str) else None
        if said not in (None, source, "text") and source != "text":
            raise ValueError(
                f"source={source!r}: by its name, data_files={data_files!r} is "
                f"{said}. Set source={said}."
            )
    elif source in _FORMAT_OF:
        raise ValueError(f"source={source!r}: is no format. Set source={_FORMAT_OF[source]}.")
    elif _format_of(source) is not None and not Path(source).is_dir():
        raise ValueError(
            f"source={source!r}: is a file. Set source={_format_of(source)} and "
            f"data_files={source}."
        )


def _format_of(path: str) -> str | None:
    """The format that a file's name stands for; compressed files are named .jsonl.gz, say."""
    suffixes = [suffix[1:].lower() for suffix in Path(path).suffixes]
    return next((_FORMAT_OF[name] for name in reversed(suffixes) if name in _FORMAT_OF), None)


def _explain(error: Exception, source: str, split: str, data_files: Any) -> str:
    """What went wrong in `load_dataset`, in terms of the config, in one line."""
    where = f"data_files={data_files!r}" if data_files else f"source={source!r}"
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
    if isinstance(error, FileNotFoundError) and data_files:
        return f"{where}: not found. {detail}. Correct the path."
    if isinstance(error, ConnectionError):
        return (
            f"{where}: cannot be loaded from the hub: {detail}. Without a network, "
            "download the files elsewhere, and set source to their format (json, parquet, "
            "csv) and data_files to their path."
        )
    if isinstance(cause, UnicodeError):
        return f"{where}: is not in UTF-8. Set encoding, to latin-1, say."
    if source == "json" and (broken := _broken_line(data_files)):
        return f"{where}: {broken}. Correct or remove the line."
    return f"{where}, split={split!r}: cannot be loaded: {detail}. Correct the file or these keys."


def _broken_line(data_files: Any) -> str | None:
    """The first line of local, uncompressed JSON lines that is no object, if that can be told."""
    with suppress(OSError, TypeError, ValueError):
        for path in [data_files] if isinstance(data_files, str) else list(data_files):
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(lines, 1):
                if line.strip() and not _is_json_object(line):
                    return f"line {number} of {path} is no JSON object: {shortened(line)}"
    return None


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


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
