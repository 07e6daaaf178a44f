"""Texts for the user: errors, and texts and values from outside. Imports no torch."""

from __future__ import annotations

import errno
import inspect
import json
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

import yaml

# C0 and C1, which hold the terminal's commands, without newline and tab; characters that change the
# direction of writing or end a line unseen; and lone surrogates, which cannot be encoded.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# Names of config keys whose values are never shown
_SECRET = re.compile(r".*(token|secret|password|authorization|api_?keys?|_key)", re.IGNORECASE)
_NOT_USERS = (str(Path(__file__).parents[1]), os.path.dirname(os.__file__), "<")
_MAX_DEPTH = 50
_LARGEST_INT = 2**63 - 1


def visible(text: str) -> str:
    r"""Spell out a text's control characters, ESC as ``\x1b``, except newlines and tabs."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def is_secret(key: str, value: object) -> bool:
    """Whether a config's value is a secret, by its key; ``${oc.env:NAME}`` only names one."""
    name = re.sub(r"(\.\d+)*$", "", key).rpartition(".")[2]
    is_text = isinstance(value, str) and not value.startswith("${")
    return is_text and _SECRET.fullmatch(name) is not None


def map_values(change: Callable[[str, object], object], value: object, key: str = "") -> object:
    """Return nested dicts and lists with each leaf replaced by ``change(key, value)``."""
    if isinstance(value, dict):
        return {name: map_values(change, item, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [map_values(change, item, key) for item in value]
    return change(key, value)


def flat(value: object, prefix: str = "") -> dict[str, object]:
    """Return the leaves of nested mappings and lists by dotted key, as on the command line."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {prefix.removesuffix("."): value}
    return {k: v for name in value for k, v in flat(value[name], f"{prefix}{name}.").items()}


def without_secrets(value: object, key: str = "") -> object:
    """Return a config's nested values with ``...`` in place of secrets."""
    return map_values(lambda key, text: "..." if is_secret(key, text) else text, value, key)


def override_without_secrets(argument: str) -> str:
    """Hide secrets in a command line's ``key=value``; the value may be a YAML list or mapping."""
    key, is_set, text = argument.partition("=")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # as for 2024-13-01
        value = text
    if isinstance(value, (dict, list)) and (hidden := without_secrets(value, key)) != value:
        return f"{key}={json.dumps(hidden)}"
    return f"{key}={without_secrets(text, key)}" if is_set else argument


def shortened(text: str, limit: int = 80) -> str:
    """Return a text as one visible line; beyond ``limit`` characters, its middle is left out."""
    line = " ".join(visible(text).split())
    half = limit // 2
    return line if len(line) <= limit else f"{line[:half]} ... {line[-half:]}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, whose rows all have as many cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def suggest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return " Did you mean X?" with the known name that is most like ``name``, or nothing.

    A name without dots may be the last part of a known one.
    """
    names: dict[str, str] = {}
    for each in known:
        names.setdefault(each.lower(), each)
        if "." not in name:
            names.setdefault(each.lower().rpartition(".")[2], each)
    near = get_close_matches(name.lower(), names, n=1, cutoff=cutoff)
    return f" Did you mean {names[near[0]]}?" if near else ""


def describe(error: BaseException, *, frames: int = 0) -> str:
    """Return an exception as visible text, with the last ``frames`` entries of its traceback."""
    try:
        if frames:
            lines = traceback.format_exception(error, limit=-frames)
        else:
            lines = traceback.format_exception_only(error)
    except BaseException:  # its own attributes raise
        lines = [type(error).__name__]
    return visible("".join(lines).strip())


def read_json(folder: str | Path, name: str, *, key: str) -> dict[str, Any]:
    """Read the JSON object in a file of the folder that the config's ``key`` names."""
    try:
        content = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
        found = type(content).__name__
    except ValueError as error:
        content, found = None, str(error)
    if not isinstance(content, dict):
        raise ValueError(f"{key}={folder}: {name} is not a JSON object ({found}). Fetch it again.")
    return content


def told(error: BaseException) -> str:
    """Return an error of a user's module in one line, with the user's file and line if known."""
    error = error.__cause__ or error  # torchtune wraps what an import raises
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.msg} ({Path(error.filename).name}:{error.lineno})"
    return " ".join(describe(error).split()) + place_of(error)


def place_of(error: BaseException, function: Callable[..., object] | None = None) -> str:
    """Return " (file:line)" of the user's line that raised an error, if there is one.

    Of a function, it is else that of a library, or that where the function begins.
    """
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    theirs = [frame for frame in frames if not frame[0].startswith(_NOT_USERS)]
    users = [frame for frame in theirs if "/site-packages/" not in frame[0]]
    if function is not None:
        users = users or theirs
        with suppress(AttributeError, TypeError):  # it is not written in Python
            code = inspect.unwrap(getattr(function, "__func__", function)).__code__
            users = users or [(code.co_filename, code.co_firstlineno)]
    return f" ({Path(users[-1][0]).name}:{users[-1][1]})" if users else ""


def check_writable(key: str, file: Path) -> None:
    """Raise a ValueError if ``write_text`` could not write a file that ``key`` names."""
    if file.is_dir() or not file.parent.is_dir():
        raise ValueError(f"{key}={file}: name a file in a folder that is there.")
    with naming(f"{key}={file}"):
        (trial := file.with_name(f".{file.name}.try")).touch()
        trial.unlink(missing_ok=True)  # another rank may have deleted it


def write_text(file: Path, text: str) -> Path:
    """Write a file as ``replacing`` does."""
    with replacing(file) as opened:
        opened.write(text.encode())
    return file


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """Write a file beside it, then rename: nobody reads half of one, even after a kill."""
    beside = file.with_name(f".{file.name}.new")
    try:
        with naming(file):
            with beside.open("wb") as opened:
                yield opened
                opened.flush()
                os.fsync(opened.fileno())
            beside.replace(file)
    finally:
        with suppress(OSError):
            beside.unlink()


@contextmanager
def naming(file: Path | str) -> Iterator[None]:
    """Raise a ValueError that names the file if it cannot be written in the block."""
    try:
        yield
    except OSError as error:
        remedy = "Free some space, check permissions, or choose another place."
        raise ValueError(f"{file}: could not be written: {error.strerror}. {remedy}") from error


def to_json(value: Any, _above: tuple[int, ...] = ()) -> Any:
    """Turn any value into one that ``json.dumps`` writes as valid JSON.

    Sets, tuples, arrays and tensors become lists, keys become strings, and numbers that are not
    finite become None. All else becomes its string, as do integers beyond 64 bits (in hexadecimal)
    and values nested more than 50 deep or in themselves; where that raises, its type's name.
    """
    try:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if abs(value) <= _LARGEST_INT else hex(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else None
        if id(value) not in _above and len(_above) < _MAX_DEPTH:
            _above += (id(value),)
            if hasattr(value, "tolist"):  # tensors, arrays and their numbers
                return to_json(value.tolist(), _above)
            if isinstance(value, Mapping):
                return {_text(key): to_json(item, _above) for key, item in value.items()}
            if isinstance(value, (list, tuple, set, frozenset)):
                return [to_json(item, _above) for item in value]
    except Exception:  # whatever its own methods raise
        pass
    return _text(value)


def _text(value: object) -> str:
    try:
        return str.__str__(str(value))
    except Exception:
        return f"<{type(value).__name__}>"


# Environment variable; set it to see where an error was raised.
TRACEBACK = "TORCHTUNE_GRPO_TRACEBACK"


def end_on_ctrl_c() -> None:
    """Let Ctrl-C end this process at once, without Python's traceback.

    Where it is ignored, as in a shell's background jobs, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class ConfigError(ValueError):
    """Mistakes in a config: sentences that name a key, its value and the remedy."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class FirstRankFailed(RuntimeError):
    """Raised on the other ranks when the first one fails; the first one reports why."""


@contextmanager
def noted(problems: list[str]) -> Iterator[None]:
    """Add a ValueError raised in the block to ``problems``, so that the next check runs, too."""
    try:
        yield
    except ValueError as error:
        problems += problems_in(error)


def problems_in(error: BaseException) -> list[str]:
    """Return an error's messages, one visible line for each mistake."""
    problems = getattr(error, "problems", None) or [str(error) or type(error).__name__]
    return [" ".join(visible(problem).split()) for problem in problems]


def _end_output() -> None:
    """Write what was printed; drop it if that fails, or Python would fail at the end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def errors_in_one_line(keep: Callable[[str], str | None] = lambda text: None) -> Iterator[None]:
    """End the process with exit code 1 where the block fails; the last line is ``Error: ...``.

    Config errors and this package's own errors say what to do; for any other, the traceback is
    printed above that line. ``TORCHTUNE_GRPO_TRACEBACK=1`` prints every traceback, and ``keep``
    writes it to a file and returns the path. Errors that all ranks raise are reported once on each
    machine.
    """
    try:
        yield
        sys.stdout.flush()  # Python's own flush, at its exit, would only print a warning
    except BrokenPipeError:  # `| head` has read enough
        _end_output()
        sys.exit(1)
    except Exception as error:
        trace = traceback.format_exc()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            where = error.filename or "standard output"  # a file's writer names the file
            error = ValueError(f"{where}: could not be written: {error.strerror}.")
        _end_output()
        file = keep(trace)
        rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
        is_reported = isinstance(error, ConfigError) and local_rank != "0"
        if is_reported or isinstance(error, FirstRankFailed):
            sys.exit(1)
        is_complete = getattr(error, "says_all", isinstance(error, ValueError))
        lines = [*getattr(error, "__notes__", ())]
        if os.environ.get(TRACEBACK) or not is_complete:
            lines.append(trace)
        elif file:
            lines.append(f"Traceback: {file}")
        who = "Error" if rank == "0" else f"Error on rank {rank}"
        name = "" if is_complete else f"{type(error).__name__}: "
        lines += [f"{who}: {name}{problem}" for problem in problems_in(error)]
        print(visible("\n".join(lines)), file=sys.stderr, flush=True)
        sys.exit(1)
