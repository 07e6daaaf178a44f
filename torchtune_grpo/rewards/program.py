"""The program that a completion stands for: its fenced blocks, read line by line."""

from __future__ import annotations

import re
from typing import NamedTuple

_LANGUAGE = re.compile(r"[ \t]*[{.]{0,2}([A-Za-z0-9_+-]*)")
_PYTHON = ("", "python", "python3", "py")
MAX_BLOCKS = 1000  # of more, none counts
# How a line at the left margin looks in a block that only defines things.
_DEFINING = re.compile(r"(?:async |def |class |import |from |@|#|[)\]}]|[A-Za-z_]\w* = [^(]*$)")


class Block(NamedTuple):
    """A fenced block's lines, and whether the fence that ends it is there."""

    code: str
    closed: bool


def behind_thinking(text: str) -> str:
    """What stands behind the last ``</think>``."""
    return text.rpartition("</think>")[2]


def code_blocks(text: str) -> list[Block]:
    """The fenced blocks of Python (or of no named language) behind a text's thinking.

    A fence is a line that begins with three or more backticks or tildes, however far it is
    indented. A line of at least as many ends the block, unless a triple-quoted string is open; the
    end of the text ends it, too. Takes linear time.
    """
    blocks: list[Block] = []
    fence, lines, indent, is_python, quoted = "", [""], 0, False, False
    for line in behind_thinking(text).replace("\r\n", "\n").split("\n"):
        bare = line.strip(" \t")
        mark = bare[0] if bare.startswith(("```", "~~~")) else ""
        if fence and bare.startswith(fence) and not bare.strip(mark) and not quoted:
            if is_python:
                blocks.append(Block("\n".join([*lines, ""]), closed=True))
            fence = ""
        elif fence:
            lines.append(line[indent:] if line[:indent].isspace() else line)
            quoted ^= is_python and (line.count('"""') + line.count("'''")) % 2 == 1
        elif mark and mark not in (told := bare.lstrip(mark)):
            if len(blocks) == MAX_BLOCKS:
                return []
            fence, lines, quoted = bare[: len(bare) - len(told)], [], False
            indent = len(line) - len(line.lstrip(" \t"))
            language = _LANGUAGE.match(told)
            is_python = language is not None and language.group(1).lower() in _PYTHON
    return blocks + [Block("\n".join([*lines, ""]), closed=False)] * bool(fence and is_python)


def definition_of(name: str) -> re.Pattern[str]:
    """Finds a line at the left margin that defines a function (or class) of that name."""
    name = re.escape(name)
    return re.compile(
        rf"^(?:(?:(?:async[ ]+)?def|class)[ ]+{name}\b|{name}[ ]*(?::[^=\n]*)?=(?!=))", re.MULTILINE
    )


def extract_program(text: str, *, setup: str, entry_point: str) -> str:
    """The program that a completion stands for.

    It is ``setup``, the last fenced block that defines the function, and the blocks around it that
    define other things and do nothing else. Without any such block the text behind the thinking is
    the program, or, if it does not define the function, the continuation of ``setup``, as a base
    model writes it. It need not be valid code.

    Args:
        text (str): prefill and completion.
        setup (str): the prompt's code: imports, helpers, and the function's head.
        entry_point (str): the function's name.
    """
    defines = definition_of(entry_point).search
    blocks = [block.code for block in code_blocks(text)]
    found = {index for index, code in enumerate(blocks) if defines(code)}
    if found:
        others = {index for index, code in enumerate(blocks) if _only_defines(code)} - found
        kept = [blocks[index] for index in sorted({max(found), *others})]
        return "\n\n".join([setup, *kept]) + "\n"
    tail = behind_thinking(text)
    return f"{setup}\n\n{tail}\n" if defines(tail) else f"{setup}{tail}\n"


def _only_defines(code: str) -> bool:
    margin = [line for line in code.split("\n") if line[:1].strip()]
    return all(map(_DEFINING.match, margin))
