"""Extraction of the program in a completion, wherever the model has put it, in linear time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_BLOCKS = 1000  # with more, no block counts
_PYTHON = ("python", "python3", "py", "py3", "ipython", "ipython3")
# A line that opens a fence: in a quotation, in a list or after a tag; with "python", after text.
_BEFORE = r"(?P<before>[ \t>]*(?:(?:[-*+]|[0-9]+[.)])[ \t]+)?(?:</?\w+>[ \t]*)*)"
_TEXT_BEFORE = rf"[^`\n]*[^`\n](?=```(?:{'|'.join(_PYTHON)})[ \t]*$)"
_FENCE = re.compile(rf"(?:{_BEFORE}|{_TEXT_BEFORE})(?P<fence>```+|~~~+)(?P<info>[^`\n]*)")
_QUOTATION = re.compile(r"^[ \t]*>[ ]?")
_LANGUAGE = re.compile(r"[ \t]*[{.]{0,2}([A-Za-z0-9_+-]*)")
_GLUED = re.compile(r"(?<=[\w)\]}\"'])```[ \t]*$", re.MULTILINE)  # return x```
_BRACKETS = re.compile(r"\[/?(?:PYTHON|BEGIN|DONE)\]")  # as in the prompts of MBPP and Code Llama
_ENDING = re.compile(r"(?:<\|\w+\|>|</\w+>)\Z")  # end marker of a turn or an answer
# A string or comment that begins in a line; only the quote of a triple-quoted string matches.
_STRING = re.compile(r"""\"\"\"|'''|"(?:\\.|[^"\\])*+"?|'(?:\\.|[^'\\])*+'?|#""")
_MAX_SEARCHES = 10  # searches per text that end behind the fence which they find
# A line at the left margin of a block that only defines things.
_DEFINING = re.compile(r"(?:async |def |class |import |from |@|#|[)\]}]|[A-Za-z_]\w* = [^(]*$)")
_READS_INPUT = re.compile(r"\binput\(|\bstdin\b|\bopen\(0\b")
_FUTURE = re.compile(r"^from __future__ import [^\n(]*\n?", re.MULTILINE)
_STARTS = re.compile(r"^(?:async |def |class |import |from \w[\w.]* import |@\w)", re.MULTILINE)
_KEYWORDS = (
    "and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|"
    "global|if|import|in|is|lambda|match|nonlocal|not|or|pass|raise|return|try|type|while|with|yield"
)
_STATEMENT = re.compile(rf"[ \t#]|$|(?:{_KEYWORDS})\b|[^=(]*[=(]")  # or a part of one
_PROSE = re.compile(
    rf"(?!(?:{_KEYWORDS})\b)[A-Z]?[a-z']+,? (?!{_KEYWORDS}\b)\w|[-*] |\*\*|[0-9]+\. "
)


class Block(NamedTuple):
    """The lines of a fenced block, whether its fence names Python, and whether it is closed."""

    code: str
    named: bool
    closed: bool


def code_blocks(text: str) -> list[Block]:
    """Find the fenced blocks of Python after a text's thinking.

    A fence is three or more backticks or tildes, also in a quotation or a list. A line that starts
    with as many ends the block, unless it is in a triple-quoted string that is closed later; so
    does the end of the text. Blocks of no named language count as well.
    """
    return _blocks(_behind_thinking(text))


def _behind_thinking(text: str) -> str:
    tail = text.rpartition("</think>")[2].partition("<think>")[0]
    return tail.replace("\r\n", "\n").replace("\u00a0", " ")


def _blocks(text: str) -> list[Block]:
    blocks: list[Block] = []
    searches = 0
    lines, at = _GLUED.sub("\n```", text).split("\n"), 0
    while at < len(lines):
        opened = _FENCE.fullmatch(lines[at])
        at += 1
        if opened is None:
            continue
        if len(blocks) == MAX_BLOCKS:
            return []
        end, searched = _end_of_block(
            lines, at, opened["fence"], in_strings=searches < _MAX_SEARCHES
        )
        searches += searched
        language = _LANGUAGE.match(opened["info"])[1].lower()  # type: ignore[index]  # matches all
        if language in ("", *_PYTHON):
            inner = _unwrapped(lines[at:end], opened["before"] or "")
            code = "\n".join([*inner, ""])
            blocks.append(Block(code, named=language != "", closed=end < len(lines)))
        at = end + 1
    return blocks


def _end_of_block(
    lines: list[str], start: int, fence: str, *, in_strings: bool
) -> tuple[int, bool]:
    """Return the number of the line that ends a block, and whether it was passed in a search for a
    fence outside of strings, which goes on only with ``in_strings``."""
    quote, first = "", len(lines)
    for number in range(start, len(lines)):
        line = lines[number].lstrip(" \t>")
        if line.startswith(fence):
            if not (quote and in_strings):
                return number, False
            first = min(first, number)
        quote = _open_string(lines[number], quote)
    return first, first < len(lines)


def _open_string(line: str, quote: str) -> str:
    """Return the triple quote that is open after a line, if any; ``quote`` is open before it."""
    if '"' not in line and "'" not in line:
        return quote
    at = 0
    while True:
        if quote:
            at = line.find(quote, at) + 3
            if at == 2:
                return quote
        found = _STRING.search(line, at)
        if found is None or found[0] == "#":
            return ""
        quote, at = found[0] if found[0] in ('"""', "'''") else "", found.end()


def _unwrapped(lines: Sequence[str], before: str) -> Iterator[str]:
    """Strip from a block's lines the prefix that the line of its opening fence has."""
    quoted = ">" in before
    width = len(before.rpartition(">")[2][1:]) if quoted else len(before)
    for line in lines:
        if quoted:
            line = _QUOTATION.sub("", line)
        yield line if line[:width].strip() else line[width:]


def definition_of(name: str) -> re.Pattern[str]:
    """Return a pattern for a line at the left margin that defines a function or class, or the
    class of ``Solution().method``."""
    name = re.escape(name.partition("(")[0])
    return re.compile(
        rf"^(?:(?:(?:async[ ]+)?def|class)[ ]+{name}\b|{name}[ ]*(?::[^=\n]*)?=(?!=))", re.MULTILINE
    )


def _use_of(name: str) -> re.Pattern[str]:
    """Return a pattern for a line of a block of tests, which imports the function, or pytest."""
    name = re.escape(name.partition("(")[0])
    return re.compile(rf"^(?:import pytest\b|from \S+ import .*\b{name}\b)", re.MULTILINE)


def extract_program(text: str, *, setup: str, entry_point: str | None) -> str:
    """Extract the program from a text: prefill and completion.

    It consists of ``setup`` (the prompt's code), the last fenced block that defines the function,
    and the blocks around it that only define other things. A fence that names Python takes
    precedence over one that names nothing, and an answer block over the text around it. Without
    such a block, the code after the thinking is the program or, if it does not define the function,
    the text there continues ``setup``, as a base model writes it. Without ``entry_point``, the last
    block that reads input is the program, or else the last one. It need not be valid code.
    """
    tail = _behind_thinking(text)
    if "```" not in tail and "~~~" not in tail:
        tail = _BRACKETS.sub("\n```\n", tail)
    answer = tail.rpartition("<answer>")[2].partition("</answer>")[0]
    defines = definition_of(entry_point).search if entry_point else bool

    def is_helper(code: str) -> bool:
        if not entry_point or defines(code) or _use_of(entry_point).search(code):
            return False
        margin = [line for line in code.split("\n") if line[:1].strip()]
        return all(map(_DEFINING.match, margin))

    for part in dict.fromkeys([answer, tail]):
        blocks = _blocks(part)
        found = [block for block in blocks if defines(block.code)]
        if not entry_point:
            found = [block for block in found if _READS_INPUT.search(block.code)] or found
        if found:
            last = ([block for block in found if block.named] or found)[-1]
            kept = [block.code for block in blocks if block is last or is_helper(block.code)]
            return _joined(setup, "\n\n".join(kept) + "\n")
    for part in (answer, tail):
        if defines(part):
            return _joined(setup, _code_of(part) + "\n")
    return f"{setup}{tail}\n"


def _joined(setup: str, program: str) -> str:
    """Put a program after its setup; what it imports from ``__future__`` comes first."""
    future = "".join(f"{line.strip()}\n" for line in _FUTURE.findall(program))
    return f"{future}{setup}\n\n{_FUTURE.sub('', program) if future else program}"


def _code_of(text: str) -> str:
    """Return the code of a text without fences: from around the first definition up to prose."""

    def is_text(line: str) -> bool:
        return bool(_PROSE.match(line) or _FENCE.match(line))

    text = text.rstrip()
    while ending := _ENDING.search(text, max(0, len(text) - 40)):
        text = text[: ending.start()].rstrip()
    lines = text.split("\n")
    starts = (number for number, line in enumerate(lines) if _STARTS.match(line))
    start = next(starts, 0)
    while start and _STATEMENT.match(lines[start - 1]) and not is_text(lines[start - 1]):
        start -= 1
    quote = ""
    for number in range(start, len(lines)):
        if not quote and is_text(lines[number]):
            return "\n".join(lines[start:number])
        quote = _open_string(lines[number], quote)
    return "\n".join(lines[start:])
