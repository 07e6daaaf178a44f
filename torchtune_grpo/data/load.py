"""Rows from local files, from saved data sets and from the Hugging Face hub."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from threading import Thread
from typing import Any

import datasets
import fsspec  # type: ignore[import-untyped]
from datasets import ReadInstruction, load_dataset, load_from_disk
from huggingface_hub import constants, get_session
from torch.utils.data import ConcatDataset, Subset
from torchtune.utils import get_logger

from torchtune_grpo.config.text import describe, shortened, suggest

log = get_logger("INFO")

_FORMATS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BOOLEANS = frozenset(("true", "True", "TRUE", "false", "False", "FALSE"))  # to pandas
_NUMBER = re.compile(r" *[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)? *")
_HUB_SECONDS = 3
_SPLITS = ("train", "test", "validation")  # names for data without splits, beside any others


def load_rows(
    source: str, *, split: str = "train", data_files: object = None, **options: object
) -> Iterable[Any]:
    """Load the rows of one split; files without named splits are that split, whatever its name."""
    try:
        return _load(source, split, data_files, options)
    except Exception as error:  # from parsers, the file system or the network
        cause = shortened(_cause(error, source), 400)
        raise ValueError(f"{origin(source, data_files)}, split={split!r}: {cause}") from error


def _cause(error: Exception, source: str) -> str:
    """Return why rows could not be loaded, with the remedy where it is known."""
    if isinstance(error, UnicodeError):
        return f"the file is not in UTF-8; set encoding, as to latin-1 or utf-16 ({error})"
    if isinstance(error, ImportError) and "://" in source:
        return f"download the file, and give its path ({error})"
    return describe(error.__cause__ or error).removeprefix("ValueError: ")


def as_sequence(rows: Any, num_samples: int | None) -> Sequence[Any]:
    """Return rows that can be read one by one, of a table of pandas or of what is only iterable."""
    if hasattr(rows, "iterrows"):
        return rows.to_dict("records")
    if isinstance(rows, Mapping):
        names = ", ".join(map(str, rows))
        kind = "one split" if isinstance(rows, datasets.DatasetDict) else "a list of dicts"
        raise ValueError(f"rows: a mapping of {shortened(names, 100)}; give {kind} of it.")
    is_sequence = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    return rows if is_sequence else [*islice(rows, num_samples)]


def origin(source: str, data_files: object) -> str:
    """Name where rows come from, as the config does."""
    return f"source={source!r}" + ("" if data_files is None else f", data_files={data_files!r}")


def _load(source: str, split: str, data_files: Any, options: dict[str, Any]) -> Iterable[Any]:
    name = re.match(r"\w*", split)[0]  # type: ignore[index]  # matches any text
    path = Path(source)
    if any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
        saved = load_from_disk(source, **options)
        return _select(_named(saved, name), split)
    plain = path.with_suffix("") if path.suffix in _COMPRESSED else path
    file_format = source if source in _FORMATS.values() else _FORMATS.get(plain.suffix.lower())
    if file_format is None:
        if path.is_file():
            raise ValueError(
                f"a file ends in {', '.join(_FORMATS)}, perhaps with {', '.join(_COMPRESSED)}; "
                f"for another, name its format: source=json data_files={source}"
            )
        if not path.exists():
            _check_hub(source)
        return load_dataset(source, split=split, data_files=data_files, **options)
    if (source == file_format) == (data_files is None):
        raise ValueError("give the path of a file as source, or its format and data_files")
    files = _named(source if data_files is None else data_files, name)
    if file_format == "json":
        if unknown := [*options.keys() - {"encoding", "field"}]:
            raise ValueError(
                f"{unknown[0]}: JSON files take encoding and field alone; they need no streaming, "
                "as their rows stay text until they are used"
            )
        tables = {name: _read_json(paths, **options) for name, paths in files.items()}
        return _select(tables, split)
    if file_format == "csv":
        options.setdefault("keep_default_na", False)  # True would read the text "None" as null
        if ".tsv" in str(files):
            options.setdefault("sep", "\t")
        if texts := set(_check_csv(files.values(), **options)):
            options["converters"] = dict.fromkeys(sorted(texts), str)
    return load_dataset(file_format, split=split, data_files=files, **options)


def _named(data: object, name: str) -> Mapping[str, object]:
    """Return data by split; those without splits are one of any name that is not misspelt."""
    if isinstance(data, Mapping):
        return data
    if name not in _SPLITS and suggest(name, _SPLITS, cutoff=0.7):
        raise ValueError("the file has no splits; use train")
    return {name: data}


def _check_hub(source: str) -> None:
    """Raise a ValueError if the hub does not answer, where its client would try for a minute."""

    def ask() -> None:
        with suppress(Exception):
            answers.append(get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS))

    answers: list[object] = []
    asking = Thread(target=ask, daemon=True)  # looking up a name cannot be given a limit
    asking.start()
    asking.join(_HUB_SECONDS)
    if not (answers or constants.HF_HUB_OFFLINE):
        raise ValueError(
            f"there is no file {source}, and {constants.ENDPOINT} does not answer; set "
            "HF_HUB_OFFLINE=1 to look in the cache alone."
        )


class _JsonRows(Sequence[object]):
    """Rows kept as JSON text: parsed, a million of them would take gigabytes.

    Columns that a row lacks are None. `datasets` is not used: it would turn a text such as
    "2024-01-02" into a time, and integers beside floats into floats.
    """

    def __init__(self) -> None:
        self._texts: list[bytes] = []
        self._names: dict[str, None] = {}

    def add(self, row: object, text: str | None = None) -> None:
        self._texts.append((json.dumps(row) if text is None else text).encode())
        if isinstance(row, dict) and row.keys() - self._names:
            self._names |= dict.fromkeys(row)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: Any) -> Any:
        row = json.loads(self._texts[index])
        return {**dict.fromkeys(self._names), **row} if isinstance(row, dict) else row


def _select(tables: Mapping[str, Any], split: str) -> Any:
    """Select the rows of a split, or of slices and sums of splits: ``train[:90%]+test``."""
    lengths = {name: len(table) for name, table in tables.items()}
    parts = ReadInstruction.from_spec(split).to_absolute(lengths)
    return ConcatDataset(Subset(tables[p.splitname], range(p.from_, p.to)) for p in parts)


def _read_json(
    paths: object, *, encoding: str = "utf-8-sig", field: str | None = None
) -> _JsonRows:
    """Read files of JSON lines, or of one JSON list, which may be a ``field`` of the file."""
    rows = _JsonRows()
    for opened in fsspec.open_files(paths, "rt", compression="infer", encoding=encoding):
        if opened.compression is None and opened.path.endswith(".zst"):
            raise ValueError("a .zst file needs: pip install zstandard")
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


def _check_csv(
    splits: Iterable[object],
    *,
    sep: str = ",",
    quotechar: str = '"',
    encoding: str = "utf-8-sig",
    keep_default_na: bool = False,
    **others: object,
) -> Iterator[str]:
    """Yield the columns with booleans, or with numbers and anything else, in all splits' files.

    From one part of such a column pandas may make numbers, and from the next text. Records of
    another length than the header's, which pandas shifts or fills, are refused.
    """
    if others.keys() - {"streaming"}:  # then it is for pandas to read them
        return
    begins_with_number: dict[str, bool] = {}  # by column
    files = chain.from_iterable(
        fsspec.open_files(paths, "rt", compression="infer", encoding=encoding, newline="")
        for paths in splits
    )
    for opened in files:
        # A file that is not there is told by ``load_dataset``; a field may be too long to be read.
        with suppress(FileNotFoundError, csv.Error), opened as file:
            records = csv.reader(file, delimiter=sep, quotechar=quotechar)
            header = next(records, [])
            other = next((mark for mark in ";\t|" if len(header) == 1 and mark in header[0]), None)
            if other is not None:
                raise ValueError(f"{opened.path}: its header has no {sep!r}; set sep={other!r}")
            for record in records:
                if record and len(record) != len(header):
                    raise ValueError(
                        f"{opened.path}, line {records.line_num}: {len(record)} fields, and the "
                        f"header has {len(header)}; put texts with {sep!r} in quotes"
                    )
                for name, value in zip(header, record):
                    is_number = _NUMBER.fullmatch(value) is not None
                    is_mixed = begins_with_number.setdefault(name, is_number) != is_number
                    if value in _BOOLEANS or (is_mixed and not keep_default_na):
                        yield name


def digest(rows: Any) -> str:
    """Return a digest of rows in memory."""
    found = hashlib.sha256()
    for part in rows.iter(1000) if hasattr(rows, "iter") else rows:  # a table's rows are slow
        found.update(json.dumps(part, default=_shown, skipkeys=True).encode())
    return f"in memory (sha256 {found.hexdigest()[:16]})"


def _shown(value: object) -> str:
    """Return what stands for a value in a digest: without what differs between processes."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_shown, value)))}}}"
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))
