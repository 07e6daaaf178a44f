"""Reads the rows of a hub data set or of local files, with errors that name the config key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import datasets
import huggingface_hub.utils
from datasets import load_dataset
from datasets.exceptions import DatasetsError

# Formats of local files. Without data_files, `datasets` would take whatever lies in the folder.
_FILE_FORMATS = ("json", "csv", "parquet", "arrow", "text")


def load_rows(
    source: str, *, split: str, num_samples: int | None, **load_dataset_kwargs: Any
) -> list[dict[str, Any]]:
    """Loads the rows of one split; the arguments are those of :class:`RLDataset`.

    ``data_files`` without split names holds the split that is asked for, whatever its name.

    Raises:
        ValueError: if the data set, a file or the split does not exist or cannot be read.
    """
    data_files = load_dataset_kwargs.get("data_files")
    if source in _FILE_FORMATS and not (data_files or load_dataset_kwargs.get("data_dir")):
        raise ValueError(
            f"source: {source!r} reads local files, but data_files is {data_files!r}. "
            "Set data_files to the path of the file."
        )
    split_name = re.match(r"\w+", split) if isinstance(split, str) else None
    if split_name is None:
        raise ValueError(f"split: {split!r} names no split. Set it to one such as train.")
    if data_files and not isinstance(data_files, dict):
        load_dataset_kwargs["data_files"] = {split_name.group(): data_files}
    try:
        with _hidden_progress_bars():
            loaded = load_dataset(source, split=split, **load_dataset_kwargs)
    except (  # the last two for a source or file whose name is none
        *(OSError, ValueError, TypeError, StopIteration, DatasetsError),
        *(AttributeError, IndexError),
    ) as error:
        raise ValueError(_explain(error, source, split, data_files)) from error
    if not isinstance(loaded, datasets.Dataset):
        raise ValueError(
            f"source: {source!r} gave a {type(loaded).__name__}, but rows must be at hand to be "
            "shuffled and counted. Remove the key streaming."
        )
    if num_samples is not None:
        loaded = loaded.select(range(min(num_samples, len(loaded))))
    return list(loaded)


def _explain(error: Exception, source: str, split: str, data_files: Any) -> str:
    """What went wrong in `load_dataset`, in terms of the config."""
    where = f"source {source!r}" + (f" with data_files {data_files!r}" if data_files else "")
    detail = str(error.__cause__ or error)
    if "Unknown split" in detail:
        return f"split: {split!r} is not in {where}. {detail}"
    if isinstance(error, StopIteration) or "corresponds to no data" in detail:
        return f"{where}: split {split!r} holds no rows. Give a data set with at least one row."
    if isinstance(error, FileNotFoundError) and data_files:
        return f"data_files: {data_files!r} not found. {detail}. Correct the path."
    if isinstance(error, ConnectionError):
        return (
            f"source: cannot load {source!r}: {detail}. Without a network, download the files "
            "elsewhere and set source to their format (json, parquet, csv) and data_files to "
            "their path."
        )
    return (
        f"Cannot load {where}, split {split!r}: {detail} Check these keys; keys that the data set "
        "class does not know itself go to datasets.load_dataset."
    )


@contextmanager
def _hidden_progress_bars() -> Iterator[None]:
    """Keeps the loaders' bars off the terminal and leaves the user's own setting as it was."""
    with ExitStack() as restore:
        for library in (datasets.utils, huggingface_hub.utils):
            if not library.are_progress_bars_disabled():
                library.disable_progress_bars()
                restore.callback(library.enable_progress_bars)
        yield
