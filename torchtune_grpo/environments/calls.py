"""Tool calls in the models' own forms; the chat template shows which form a model has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtune_grpo.data.chat import message

# The text of a turn -> the text around its calls, and the calls as JSON gives them; raises a
# ValueError if a call is not well-formed.
Parser = Callable[[str], tuple[str, list[Any]]]

_THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>\s*", re.DOTALL)
_LLAMA = re.compile(r"(?:<\|python_tag\|>)?\{\s*\"name\"\s*:")
_GEMMA = re.compile(r"<\|tool_call>call:(\w+)(\{.*?\})<tool_call\|>\s*", re.DOTALL)
_GEMMA_QUOTE = '<|"|>'
# What only the templates with another form of calls hold.
_OTHERS = {
    "<function=": "XML (Qwen3.5, Qwen3-Coder, Nemotron 3)",
    "<arg_key>": "GLM's tags",
    "[TOOL_CALLS]": "Mistral's",
    "<|tool_call_start|>": "LFM2's",
    "<|channel|>": "harmony (gpt-oss)",
    "tool▁call": "DeepSeek's",
    "<|START_ACTION|>": "Cohere's",
}


def _hermes(text: str) -> tuple[str, list[Any]]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen 2.5 and 3 write it."""
    return _HERMES.sub("", text), [json.loads(call) for call in _HERMES.findall(text)]


def _llama(text: str) -> tuple[str, list[Any]]:
    """``{"name": ..., "parameters": {...}}``, as Llama 3.1 and 3.2 write it."""
    content, calls, end = "", [], 0
    while found := _LLAMA.search(text, end):
        start = text.index("{", found.start())
        call, stop = json.JSONDecoder().raw_decode(text, start)
        calls.append({"name": call["name"], "arguments": call.get("parameters")})
        content, end = content + text[end : found.start()], stop
    return content + text[end:].lstrip("; \n") if calls else text, calls


def _gemma(text: str) -> tuple[str, list[Any]]:
    """``<|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>``, as Gemma 4 writes it."""

    def arguments(written: str) -> Any:
        # Every second piece is a text; the keys between them have no quotes.
        pieces = written.split(_GEMMA_QUOTE)
        pieces[::2] = [re.sub(r"([{,]\s*)(\w+)\s*:", r'\1"\2":', piece) for piece in pieces[::2]]
        pieces[1::2] = map(json.dumps, pieces[1::2])
        return json.loads("".join(pieces))

    calls = [{"name": n, "arguments": arguments(given)} for n, given in _GEMMA.findall(text)]
    return _GEMMA.sub("", text), calls


PARSERS: Sequence[Parser] = (_hermes, _llama, _gemma)


def read_turn(text: str, parse: Parser) -> dict[str, Any]:
    """Return an assistant's turn as a message, as TRL's rewards get it.

    Thinking before the answer is its ``reasoning_content``. A turn with a call that is not
    well-formed has none: its text is its content.
    """
    thought = _THOUGHT.match(text) if "</think>" in text else None
    rest = text[thought.end() :] if thought else text
    try:
        content, calls = parse(rest)
        functions = [_checked(call) for call in calls]
    except (ValueError, KeyError, TypeError, RecursionError):
        return message("assistant", text)
    turn = message("assistant", content.strip() if functions else content)
    if thought:
        turn["reasoning_content"] = thought[1].strip()
    if functions:
        turn["tool_calls"] = [{"type": "function", "function": each} for each in functions]
    return turn


def _checked(call: Any) -> dict[str, Any]:
    arguments = call.get("arguments") or {} if isinstance(call, Mapping) else None
    if not isinstance(arguments, Mapping) or not isinstance(call["name"], str):
        raise ValueError("a call has a name and named arguments")
    return {"name": call["name"], "arguments": dict(arguments)}


def find_parser(template_text: Callable[[Sequence[Mapping[str, Any]]], str]) -> Parser:
    """Find the form in which a chat template writes calls; ``template_text`` renders messages.

    Raises a ValueError that names the form, if it is none of ours.
    """
    call = {"name": "probe", "arguments": {"key": "value"}}
    turn = message("assistant", "") | {"tool_calls": [{"type": "function", "function": call}]}
    try:
        text = template_text([message("user", "a"), turn])
    except ValueError as error:
        text = str(error)
    for parse in PARSERS:
        try:
            if parse(text)[1][-1:] == [call]:
                return parse
        except (ValueError, KeyError, TypeError):
            continue
    name = next((name for mark, name in _OTHERS.items() if mark in text), None)
    found = "writes no tool calls" if name is None else f"writes tool calls in another form: {name}"
    raise ValueError(
        f"tools: the chat template {found}. Train a model with the form of Qwen 2.5 or 3 (Hermes), "
        "Llama 3.1 or 3.2, or Gemma 4; or give an environment that has step(text), which needs no "
        "calls."
    )
