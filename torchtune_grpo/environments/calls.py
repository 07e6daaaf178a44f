"""Tool calls in the models' own forms; the chat template shows which form a model has.

Arguments get the types of their tool's JSON schema: models often write 7 as a text.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

from torchtune_grpo.models.tokenizer import OTHER_TOOLS
from torchtune_grpo.trajectory import ChatMessage, message

# The text of a turn, and the names of the tools -> the text around its calls, and the calls as JSON
# gives them; of a call that is not JSON, its text.
Parser = Callable[[str, Container[str]], tuple[str, list[object]]]

MALFORMED = "This is not a well-formed call: it has a tool's name, and arguments by their names."
_THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
_HERMES = re.compile(r"<tool_call>\s*(.*?)</tool_call>\s*", re.DOTALL)
_HERMES_END = re.compile(r"\s*</tool_call>\s*")
_LLAMA = re.compile(
    r"""(?:<\|python_tag\|>)?(?P<call>\{\s*("type"\s*:\s*"function"\s*,\s*)?"""
    r""""name"\s*:\s*"(?P<name>[^"]*)"\s*,\s*"(?P<key>parameters|arguments)"\s*:)"""
)
_GEMMA = re.compile(r"<\|tool_call>call:(\w+)(.*?)<tool_call\|>\s*", re.DOTALL)
_LFM = re.compile(r"<\|tool_call_start\|>(.*?)<\|tool_call_end\|>\s*", re.DOTALL)
_GEMMA_QUOTE = '<|"|>'


def _hermes(text: str, names: Container[str]) -> tuple[str, list[object]]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen 2.5 and 3 write it."""
    # Searching the rest would take a square of its length.
    closed = text.rpartition("</tool_call>")[0] + "</tool_call>"
    content, end, calls = "", 0, list[object]()
    while found := _HERMES.search(closed, end):
        content += text[end : found.start()]
        call, end = _json(found[1].strip()), found.end()
        if isinstance(call, str):  # a text among its arguments may hold the closing tag
            with suppress(ValueError, RecursionError):
                whole, last = json.JSONDecoder().raw_decode(text, found.start(1))
                if tag := _HERMES_END.match(text, last):
                    call, end = whole, tag.end()
        calls.append(call)
    return content + text[end:].lstrip() if calls else text, calls


def _llama(text: str, names: Container[str]) -> tuple[str, list[object]]:
    """``{"name": ..., "parameters": {...}}`` of a known tool, as Llama 3.1 and 3.2 write it."""
    found = [each for each in _LLAMA.finditer(text) if each["name"] in names]
    content, end, calls = "", 0, list[object]()
    for this, following in zip_longest(found, found[1:]):
        if this.start() < end:  # within another's arguments
            continue
        content += text[end : this.start()].lstrip("; \n") if calls else text[: this.start()]
        try:
            call, end = json.JSONDecoder().raw_decode(text, this.start("call"))
            arguments = call[this["key"]]
        except (ValueError, RecursionError):
            end = following.start() if following else len(text)
            arguments = text[this.end() : end]
        calls.append({"name": this["name"], "arguments": arguments})
    return content + text[end:].lstrip("; \n") if calls else text, calls


def _gemma(text: str, names: Container[str]) -> tuple[str, list[object]]:
    """``<|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>``, as Gemma 4 writes it."""

    def arguments(written: str) -> object:
        # Every second piece is a text; the keys between them have no quotes.
        pieces = written.split(_GEMMA_QUOTE)
        pieces[::2] = [re.sub(r"([{,]\s*)(\w+)\s*:", r'\1"\2":', piece) for piece in pieces[::2]]
        pieces[1::2] = map(json.dumps, pieces[1::2])
        return _json("".join(pieces))

    content, calls = _cut_out(_GEMMA, text, "<tool_call|>")
    return content, [{"name": name, "arguments": arguments(given)} for name, given in calls]


def _lfm(text: str, names: Container[str]) -> tuple[str, list[object]]:
    """``<|tool_call_start|>[name(key='text', n=3)]<|tool_call_end|>``, as LFM 2 writes it."""
    content, lists = _cut_out(_LFM, text, "<|tool_call_end|>")
    return content, [call for written in lists for call in _python_calls(written.strip())]


def _python_calls(written: str) -> list[object]:
    """Read a list of calls in Python, with arguments in Python or JSON; else return the text."""

    def read(call: Any) -> object:
        given = {each.arg: value(each.value) for each in call.keywords}
        if call.args or None in given:
            raise ValueError("an argument has no name")
        return {"name": ast.unparse(call.func), "arguments": given}

    def value(node: ast.expr) -> object:
        with suppress(ValueError, TypeError):  # {{"a": 1}} is a set of what cannot be in one
            return ast.literal_eval(node)
        return json.loads(str(ast.get_source_segment(written, node)))

    try:
        return [read(call) for call in ast.parse(written, mode="eval").body.elts]  # type: ignore[attr-defined]
    except (AttributeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return [written]


def _cut_out(pattern: re.Pattern[str], text: str, end: str) -> tuple[str, list[Any]]:
    """Return a text without the calls that end in ``end``, and what a pattern finds in each."""
    closed, end, rest = text.rpartition(end)  # searching the rest would take a square of its length
    found = pattern.findall(closed + end)
    return pattern.sub("", closed + end) + (rest.lstrip() if end else rest), found


def _json(text: str) -> object:
    """Return what a text says in JSON, or else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _tags(name: str, argument: str, mark: str) -> Parser:
    """Return a parser of calls within ``<tool_call>`` whose names and arguments have tags, too.

    ``name`` and ``argument`` are regular expressions, and each argument begins with ``mark``.
    """
    named, pair = re.compile(name), re.compile(argument, re.DOTALL)

    def parse(text: str, names: Container[str]) -> tuple[str, list[object]]:
        content, calls = _cut_out(_HERMES, text, "</tool_call>")
        return content, [*map(read, calls)]

    def read(call: str) -> object:
        head, pairs = named.match(call), pair.findall(call)
        whole = len(pairs) == call.count(mark)
        return {"name": head[1], "arguments": dict(pairs)} if head and whole else call

    return parse


# ``<function=name><parameter=key>value</parameter></function>``, as Qwen3.5 and Nemotron 3 write it
_xml = _tags(
    r"<function=([^>\n]+)>", r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", "<parameter="
)
# ``name<arg_key>key</arg_key><arg_value>value</arg_value>``, as GLM 4.5 writes it
_glm = _tags(r"([^\s<{]+)", r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", "<arg_key>")
PARSERS: Sequence[Parser] = (_hermes, _llama, _gemma, _lfm, _xml, _glm)


def read_turn(text: str, parse: Parser, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an assistant's turn as a message, as TRL's rewards get it.

    Thinking before the answer is its ``reasoning_content``. A call that is not well-formed has
    ``error``, and as much of its name and arguments as can be read. ``tools`` are JSON schemas.
    """
    thought = _THOUGHT.match(text) if "</think>" in text else None
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    content, calls = parse(text[thought.end() :] if thought else text, schemas)
    turn = message("assistant", content.strip() if calls else content)
    if thought:
        turn["reasoning_content"] = thought[1].strip()
    if calls:
        turn["tool_calls"] = [_checked(call, schemas) for call in calls]
    return turn


def _checked(call: object, schemas: Mapping[str, Any]) -> dict[str, Any]:
    given = call if isinstance(call, Mapping) else {"arguments": call}
    name, arguments = given.get("name"), given.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        function = {"name": str(name or "unknown"), "arguments": arguments}
        return {"type": "function", "function": function, "error": MALFORMED}
    known = schemas.get(name, {}).get("properties", {})
    typed = {key: _typed(value, known.get(key)) for key, value in arguments.items()}
    return {"type": "function", "function": {"name": name, "arguments": typed}}


def _typed(value: object, schema: object) -> object:
    """Read a text as the first type of its schema that it can be, as TRL 1.16 does; or keep it."""
    if isinstance(value, str):
        for kind in _kinds(schema):
            with suppress(ValueError, RecursionError):
                return _read(value, kind)
    return value


def _kinds(schema: object) -> Iterator[str]:
    """List the types that a schema allows."""
    if isinstance(schema, Mapping):
        kinds = schema.get("type", ())
        yield from [kinds] if isinstance(kinds, str) else kinds
        for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from _kinds(choice)
        if schema.get("nullable"):
            yield "null"


def _read(text: str, kind: str) -> object:
    """Return the value of this type that a text states; raises a ValueError if it states none."""
    word = text.strip()
    match kind:
        case "integer" | "number":
            with suppress(ValueError):
                return int(word)
            number = float(word)
            if number.is_integer() and (kind == "integer" or "." not in word):
                return int(number)
            if kind == "number" and math.isfinite(number):
                return number
        case "boolean" if word.lower() in ("true", "1", "false", "0"):
            return word.lower() in ("true", "1")
        case "null" if word in ("null", "None"):
            return None
        case "object" | "array":
            value = json.loads(word)
            if isinstance(value, dict if kind == "object" else list):
                return value
    raise ValueError(f"not of type {kind}")


def find_parser(template_text: Callable[[Sequence[ChatMessage]], str]) -> Parser:
    """Find the form in which a chat template writes calls; ``template_text`` renders messages.

    Raises a ValueError if it is none of ours.
    """
    call = {"name": "probe", "arguments": {"key": "value"}}
    turn = message("assistant", "") | {"tool_calls": [{"type": "function", "function": call}]}
    try:
        text = template_text([message("user", "a"), turn])
    except ValueError as error:
        text = str(error)
    for parse in PARSERS:
        if parse(text, ["probe"])[1][-1:] == [call]:
            return parse
    raise ValueError(
        f"tools: the chat template writes no calls in a form that is read. {OTHER_TOOLS}"
    )
