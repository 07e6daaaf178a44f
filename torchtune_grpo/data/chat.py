"""Prompts as messages, and their tokens in a model's chat format or as plain text.

A tokenizer from a model's folder has the model's chat template. torchtune's tokenizers have formats
of their own. Encoding a short reply once shows how they differ: which tokens close an assistant
turn (not all can leave it open), and whether a reply's first word gets SentencePiece's leading
space (Llama 2 and Mistral: yes; Phi-3: no).
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchtune.data import Message

from torchtune_grpo.config.text import shortened
from torchtune_grpo.models.tokenizer import HFTokenizer
from torchtune_grpo.trajectory import ChatMessage, Prompt, message

ROLES = ("system", "user", "assistant", "tool")
# What every reward gets besides the columns, under TRL's names.
GIVEN = (
    "prompts",
    "completions",
    "completion_ids",
    "environments",
    "trainer_state",
    "log_extra",
    "log_metric",
)

# A prompt that no template contains by chance, and two texts that share no tokens.
_PROBE_TEXT, _PROBE_PROMPT, _PROBE_REPLY = "What is 3 + 4?", "a", "b"
# What a template writes at the end of a prompt for models that always think.
_OPENED_THINKING = re.compile(r"<think>\s*\Z")


class BadRow(ValueError):
    """A row that cannot be used, and why."""


def check_text(value: object, name: str) -> str:
    """Return a text that is usable as a prompt or as a message's content."""
    if not isinstance(value, str):
        raise BadRow(f"{name} is not text: {shortened(repr(value))}")
    if not value.strip():
        raise BadRow(f"{name} is blank")
    try:
        value.encode()
    except UnicodeEncodeError:  # tokenizers would replace it
        raise BadRow(f"{name} is not valid Unicode") from None
    return value


def check_messages(value: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a conversation that a model can continue, without the keys that are null.

    A developer is the system; a content's parts are joined if all are text.
    """
    messages = list[dict[str, Any]]()
    for number, turn in enumerate(value):
        role = turn.get("role") if isinstance(turn, Mapping) else None
        role = "system" if role == "developer" else role
        if role not in ROLES:
            given = shortened(repr(role))
            raise BadRow(f"message {number} has role={given}: give one of {', '.join(ROLES)}")
        content = _joined(turn.get("content"))
        if content or not turn.get("tool_calls"):  # a call needs no words
            check_text(content, f"the content of message {number}")
        messages.append(_without_nulls(turn) | {"role": role, "content": content})
    if not messages or messages[-1]["role"] in ("assistant", "system"):
        raise BadRow("the last message is not the user's or a tool's")
    return messages


def _joined(content: object) -> object:
    """Return the text of a content that is a list of text parts; others as they are."""
    parts = content if isinstance(content, list) else []
    of_text = [part for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    texts = [part["text"] for part in of_text if isinstance(part.get("text"), str)]
    return "".join(texts) if texts and len(texts) == len(parts) else content


def _without_nulls(value: Any) -> Any:
    """Drop keys that are null at any depth: Arrow fills each call with the others' arguments."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


class PromptEncoder:
    """Encodes prompts so that the next token is the first one of the response.

    In chat format a prompt becomes: system message, the prompt's messages (a text is one user
    message), an open assistant turn, prefill. As plain text it becomes one string after the
    beginning-of-sequence token, if the tokenizer has one: system prompt, an empty line, prompt,
    prefill. White space in the prefill is kept.

    The text of control tokens inside a prompt ("<|im_end|>") is cut in pieces and so encoded as
    ordinary text: data cannot end a turn. ``system_prompt`` and ``prefill`` come from the config
    and may hold control tokens. SentencePiece models may have user-defined symbols that the
    tokenizer does not list in ``special_tokens``; these are not found.

    The attribute ``prefill`` is what graders see before the sampled text: the given one, after the
    think block, if any, that the chat template opens.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat: bool = True,
        system_prompt: str | None = None,
        prefill: str = "",
    ) -> None:
        self.is_chat = chat
        self._tokenizer = copy.copy(tokenizer)
        self._tokenizer.max_seq_len = None  # torchtune would silently cut prompts at it
        self._system_prompt = system_prompt or ""
        self._given_prefill = self.prefill = prefill
        self._is_hf = isinstance(tokenizer, HFTokenizer)
        self._control_text = _control_text_pattern(self._tokenizer)
        self._ending = self._end_of_prompts() if self._is_hf else ""
        if chat and self._is_hf:
            self._check_template()
        elif chat:
            self._probe_reply()
        if chat and system_prompt:
            self._check_system_prompt()

    def with_tools(self, tools: Sequence[Mapping[str, object]]) -> PromptEncoder:
        """Return one whose prompts describe tools, given as JSON schemas."""
        other = copy.copy(self)
        other._tokenizer = self._tokenizer.with_tools(tools)
        return other

    def __call__(self, prompt: str | Sequence[ChatMessage]) -> list[int]:
        """Return the tokens of one prompt, prefill included."""
        written = prompt.rstrip().removesuffix("<think>") if isinstance(prompt, str) else ""
        if self._ending and written.rstrip().endswith(self._ending):
            raise BadRow(
                "the chat template has already written it; give the messages instead, a list of "
                "{role, content}, or the user's text"
            )
        if not self.is_chat:
            if not isinstance(prompt, str):
                raise BadRow("messages need chat=True")
            return self._plain_tokens(prompt)
        messages = self.messages(prompt)
        try:
            if self._is_hf:
                turns = [
                    turn if self._is_own(turn) else marked_message(turn, self._control_text)
                    for turn in messages
                ]
                text = self._tokenizer.chat_text(turns) + self._given_prefill
                return self._tokenizer.encode(text, add_bos=False, add_eos=False)
            tokens = self._dialogue_tokens(messages)
        except (KeyError, ValueError) as error:
            raise BadRow(f"the chat format refuses it: {error}") from error
        return tokens[: len(tokens) - self._num_closing] + self._prefill_tokens

    def messages(self, prompt: str | Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Return the messages that a prompt stands for, with the system prompt if there is one."""
        turns = [message("user", prompt)] if isinstance(prompt, str) else [*map(dict, prompt)]
        if self._system_prompt and turns[0]["role"] != "system":
            turns.insert(0, message("system", self._system_prompt))
        return turns

    def prompt(self, prompt: str | Sequence[ChatMessage]) -> Prompt:
        """Return a prompt as rewards get it."""
        messages = self.messages(prompt)
        return Prompt(messages[-1]["content"], messages, is_chat=not isinstance(prompt, str))

    def _plain_tokens(self, prompt: str) -> list[int]:
        pieces = _pieces(prompt, self._control_text)
        if self._system_prompt:
            pieces[0] = f"{self._system_prompt}\n\n{pieces[0]}"
        pieces[-1] += self._given_prefill
        if self._is_hf:
            pieces = [HFTokenizer.CUT.join(pieces)]
        tokens = self._tokenizer.encode(pieces[0], add_bos=True, add_eos=False)
        for piece in pieces[1:]:
            tokens += self._tokenizer.encode(piece, add_bos=False, add_eos=False)
        return tokens

    def _dialogue_tokens(self, messages: Sequence[ChatMessage], reply: str = "") -> list[int]:
        """Encode a dialogue that ends in the assistant's reply, with a torchtune tokenizer."""
        turns = []
        for turn in messages:
            if turn.get("tool_calls"):
                raise ValueError(f"{type(self._tokenizer).__name__} writes no tool_calls")
            text = turn["content"]
            pieces = [text] if self._is_own(turn) else _pieces(text, self._control_text)
            content = [{"type": "text", "content": piece} for piece in pieces]
            turns.append(Message(turn["role"], content))
        tokens, _ = self._tokenizer.tokenize_messages([*turns, Message("assistant", reply)])
        return tokens

    def _is_own(self, turn: ChatMessage) -> bool:
        """Whether a message is the config's system prompt, which may hold control tokens."""
        return turn == message("system", self._system_prompt)

    def _check_system_prompt(self) -> None:
        messages = self.messages(_PROBE_TEXT)
        try:
            if not self._is_hf:
                self._dialogue_tokens(messages)
            elif self._system_prompt.strip() not in self._tokenizer.chat_text(messages):
                raise ValueError("it leaves it out")
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"system_prompt: the chat format takes no system message ({error}). Set "
                "system_prompt=null, and write the instruction into prompt_template."
            ) from error

    def _check_template(self) -> None:
        text = self._tokenizer.chat_text([message("user", _PROBE_TEXT)])
        if _PROBE_TEXT not in text:
            raise ValueError(
                f"chat=True: the chat template leaves out the prompt: {shortened(repr(text))}. Set "
                "tokenizer.chat_template_kwargs.chat_template, or chat=False for plain text."
            )
        if opened := _OPENED_THINKING.search(text):
            if "<think>" in self._given_prefill:
                raise ValueError(
                    f"prefill={self._given_prefill!r}: the chat template opens <think> itself. "
                    "Remove it from prefill."
                )
            self.prefill = opened[0] + self._given_prefill

    def _end_of_prompts(self) -> str:
        """Return what the chat template writes behind a user's message; "" without a template."""
        try:
            text = self._tokenizer.chat_text([message("user", _PROBE_TEXT)])
        except ValueError:
            return ""
        return str(text.rpartition(_PROBE_TEXT)[2].partition("<think>")[0].strip())

    def _probe_reply(self) -> None:
        """Find out how many tokens close a reply, and how the prefill is encoded in its place."""
        probe = [message("user", _PROBE_PROMPT)]
        empty, reply = self._dialogue_tokens(probe), self._dialogue_tokens(probe, _PROBE_REPLY)
        closing = 0
        while closing < len(empty) and empty[-closing - 1] == reply[-closing - 1]:
            closing += 1
        opened = empty[: len(empty) - closing]
        if opened == self._tokenizer.encode(_PROBE_PROMPT, add_bos=True, add_eos=False):
            raise ValueError(
                f"chat=True: {type(self._tokenizer).__name__} marks no turns. Set "
                "tokenizer.prompt_template to the model's chat format, or chat=False."
            )
        options: dict[str, bool] = {"add_bos": False, "add_eos": False}
        if "trim_leading_whitespace" in inspect.signature(self._tokenizer.encode).parameters:
            written = reply[len(opened) : len(reply) - closing]
            is_trimmed = self._tokenizer.encode(_PROBE_REPLY, **options) != written
            options["trim_leading_whitespace"] = is_trimmed
        self._num_closing = closing
        prefill = self._given_prefill
        self._prefill_tokens = self._tokenizer.encode(prefill, **options) if prefill else []


def marked_message(turn: ChatMessage, pattern: re.Pattern[str] | None) -> dict[str, object]:
    """Cut all texts of a message where a pattern is found."""
    return marked(dict(turn), pattern) | {"role": turn["role"]}


def marked(value: Any, pattern: re.Pattern[str] | None) -> Any:
    """Cut all texts in a value, which may be nested: messages may hold tool calls."""
    if isinstance(value, str):
        return HFTokenizer.CUT.join(_pieces(value, pattern))
    if isinstance(value, Mapping):
        return {key: marked(item, pattern) for key, item in value.items()}
    return [marked(item, pattern) for item in value] if isinstance(value, list) else value


def _pieces(text: str, pattern: re.Pattern[str] | None) -> list[str]:
    """Split a text inside every token's name that a pattern finds."""
    if pattern is None:
        return [text]
    cuts = [match.start() + 1 for match in pattern.finditer(text)]
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _control_text_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern for where a name starts that `encode` takes as a control token."""
    special_tokens = getattr(tokenizer, "special_tokens", None) or {}
    names = [
        name
        for name, token in special_tokens.items()
        if len(name) > 1 and token in tokenizer.encode(name, add_bos=False, add_eos=False)
    ]
    if isinstance(tokenizer, HFTokenizer):
        names.append(HFTokenizer.CUT)  # it would vanish
    return names_pattern(names) if names else None


def names_pattern(names: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern for where one of these texts starts."""
    # A lookahead, because names may overlap and each must be cut. Some tokenizers have a
    # thousand names: the first letter alone rules out most places in a text.
    first = "".join(re.escape(letter) for letter in {name[0] for name in names})
    return re.compile(f"(?=[{first}])(?={'|'.join(map(re.escape, names))})")
