"""Prompts -> the tokens that a model continues, in its chat format or as plain text.

A tokenizer from a model's folder has the model's chat template. torchtune's have formats of their
own, and what differs between these is found out by asking them, once, how they write a short reply:
with which tokens they close an assistant turn (not all can be told to leave it open), and whether a
reply's first word gets SentencePiece's leading space (Llama 2 and Mistral: yes; Phi-3: no).
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchtune.data import Message

from torchtune_grpo.config.text import shortened
from torchtune_grpo.data.bad_rows import BadRow
from torchtune_grpo.data.prompt import message
from torchtune_grpo.models import HFTokenizer

# Any two texts would do that share no tokens.
_PROBE_PROMPT, _PROBE_REPLY = "a", "b"
_PROBE_TEXT = "What is 3 + 4?"  # what a template that drops the prompt does not write by chance
# What a template writes at the end of a prompt for models that always think.
_OPENED_THINKING = re.compile(r"<think>\s*\Z")


class PromptEncoder:
    """Encodes prompts so that the next token is the first one of the response.

    In chat format that is: system message, the prompt's messages (a text is one of the user), an
    assistant turn opened and not closed, prefill. As plain text: beginning-of-sequence token (if
    the tokenizer has one), then system prompt and an empty line, prompt and prefill as one string.

    The text of control tokens inside a prompt ("<|im_end|>") is encoded as ordinary text, so data
    cannot end a turn. Llama 3's tokenizer does so itself; others do not, so there such text is
    cut in pieces. ``system_prompt`` and ``prefill`` stand in the config and are left to the
    tokenizer. SentencePiece models may hold user-defined symbols that the tokenizer does not list
    in ``special_tokens``; these are not found.

    Prompts are never cut: ``tokenizer.max_seq_len``, at which torchtune would silently cut, is
    switched off in a copy of the tokenizer.

    Args:
        tokenizer: a torchtune model tokenizer, or one of ``torchtune_grpo.models.hf_tokenizer``.
        chat: chat format if True, plain text if False.
        system_prompt: text of the system message. None or "" for none. A prompt that has a system
            message of its own keeps that.
        prefill: text that the response is made to begin with. White space in it is kept.

    Attributes:
        prefill (str): what graders see in front of the sampled text: the think block that the chat
            template opens, if it does, and the prefill.

    Raises:
        ValueError: if the tokenizer marks no turns, leaves out the prompt, or takes no system
            message; if both the chat template and the prefill open a think block.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat: bool = True,
        system_prompt: str | None = None,
        prefill: str = "",
    ) -> None:
        self._tokenizer = copy.copy(tokenizer)
        self._tokenizer.max_seq_len = None
        self._system_prompt = system_prompt or ""
        self._given_prefill = self.prefill = prefill
        self._chat = chat
        self._is_hf = isinstance(tokenizer, HFTokenizer)
        self._control_text = _control_text_pattern(self._tokenizer)
        if chat and self._is_hf:
            self._check_template()
        elif chat:
            self._num_closing, self._prefill_tokens = self._probe_reply()
        if chat:
            self._check_system_prompt()

    def __call__(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens of one prompt, prefill included.

        Args:
            prompt: text, or messages ``{"role": ..., "content": ...}``.

        Raises:
            BadRow: if messages are to be plain text, or the chat format has no place for one.
        """
        if not self._chat:
            if not isinstance(prompt, str):
                raise BadRow("of messages, for which chat=False has no form")
            return self._plain_tokens(prompt)
        messages = self.messages(prompt)
        try:
            if self._is_hf:
                return self._template_tokens(messages)
            tokens = self._chat_tokens(messages)
        except (KeyError, ValueError) as error:
            raise BadRow("that the chat format refuses", str(error)) from error
        return tokens[: len(tokens) - self._num_closing] + self._prefill_tokens

    def messages(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages that a prompt stands for, the system's first if there is one."""
        turns = [message("user", prompt)] if isinstance(prompt, str) else [*map(dict, prompt)]
        if self._system_prompt and turns[0]["role"] != "system":
            turns.insert(0, message("system", self._system_prompt))
        return turns

    def _template_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        cut = HFTokenizer.CUT
        marked = [
            {k: self._marked(v) for k, v in m.items()}
            | {"role": m["role"], "content": cut.join(self._content(m))}
            for m in messages
        ]
        text = self._tokenizer.chat_text(marked) + self._given_prefill
        return self._tokenizer.encode(text, add_bos=False, add_eos=False)

    def _marked(self, value: Any) -> Any:
        """What a message holds beside its text, such as calls of tools, with cuts in its texts."""
        if isinstance(value, str):
            return HFTokenizer.CUT.join(self._pieces(value))
        if isinstance(value, Mapping):
            return {key: self._marked(item) for key, item in value.items()}
        return [*map(self._marked, value)] if isinstance(value, list) else value

    def _plain_tokens(self, prompt: str) -> list[int]:
        pieces = self._pieces(prompt)
        if self._system_prompt:
            pieces[0] = f"{self._system_prompt}\n\n{pieces[0]}"
        pieces[-1] += self._given_prefill
        if self._is_hf:
            pieces = [HFTokenizer.CUT.join(pieces)]
        tokens = self._tokenizer.encode(pieces[0], add_bos=True, add_eos=False)
        for piece in pieces[1:]:
            tokens += self._tokenizer.encode(piece, add_bos=False, add_eos=False)
        return tokens

    def _chat_tokens(self, messages: Sequence[Mapping[str, Any]], reply: str = "") -> list[int]:
        turns = [
            Message(m["role"], [{"type": "text", "content": text} for text in self._content(m)])
            for m in messages
        ]
        tokens, _ = self._tokenizer.tokenize_messages([*turns, Message("assistant", reply)])
        return tokens

    def _content(self, turn: Mapping[str, Any]) -> list[str]:
        """A message's text in pieces, but whole where it is the config's."""
        text = turn["content"]
        is_own = turn["role"] == "system" and text == self._system_prompt
        return [text] if is_own else self._pieces(text)

    def _pieces(self, text: str) -> list[str]:
        """Splits text inside every control token's name; tokenizers encode pieces one by one."""
        if self._control_text is None:
            return [text]
        cuts = [match.start() + 1 for match in self._control_text.finditer(text)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def _check_template(self) -> None:
        text = self._tokenizer.chat_text([message("user", _PROBE_TEXT)])
        if _PROBE_TEXT not in text:
            raise ValueError(
                "chat=True: the model's chat template leaves out or changes the prompt: "
                f"{shortened(repr(text))}. Take another one with "
                "tokenizer.chat_template_kwargs.chat_template, or set chat=False for plain text."
            )
        opened = _OPENED_THINKING.search(text)
        if opened is None:
            return
        if "<think>" in self._given_prefill:
            raise ValueError(
                f"prefill={self._given_prefill!r}: the model's chat template opens <think> itself, "
                "and graders see it. Remove it from prefill."
            )
        self.prefill = opened[0] + self._given_prefill

    def _probe_reply(self) -> tuple[int, list[int]]:
        """How many tokens close an empty reply, and the tokens of the prefill in its place."""
        probe = [message("user", _PROBE_PROMPT)]
        empty, reply = self._chat_tokens(probe), self._chat_tokens(probe, _PROBE_REPLY)
        num_closing = 0
        while num_closing < len(empty) and empty[-num_closing - 1] == reply[-num_closing - 1]:
            num_closing += 1
        opened = empty[: len(empty) - num_closing]
        if opened == self._tokenizer.encode(_PROBE_PROMPT, add_bos=True, add_eos=False):
            raise ValueError(
                f"chat=True: {type(self._tokenizer).__name__} marks no turns: the model "
                "could not tell the prompt from its reply. Set tokenizer.prompt_template to the "
                "model's chat format, or chat=False for plain text."
            )
        return num_closing, self._encode_reply(
            self._given_prefill, written=reply[len(opened) : len(reply) - num_closing]
        )

    def _check_system_prompt(self) -> None:
        messages = self.messages(_PROBE_PROMPT)
        try:
            if not self._is_hf:
                self._chat_tokens(messages)
            elif self._system_prompt.strip() not in self._tokenizer.chat_text(messages):
                raise ValueError("it leaves it out")
        except (KeyError, ValueError) as error:
            raise ValueError(
                "system_prompt: the tokenizer's prompt template takes no system message "
                f"({error}). Set system_prompt=null, and write the instruction into "
                "prompt_template."
            ) from error

    def _encode_reply(self, text: str, *, written: list[int]) -> list[int]:
        """Encodes text as the tokenizer encodes a reply, given how it has written the probe."""
        options: list[dict[str, bool]] = [{}]
        if "trim_leading_whitespace" in inspect.signature(self._tokenizer.encode).parameters:
            options.append({"trim_leading_whitespace": True})

        def encode(text: str, option: dict[str, bool]) -> list[int]:
            return self._tokenizer.encode(text, add_bos=False, add_eos=False, **option)

        matching = [option for option in options if encode(_PROBE_REPLY, option) == written]
        return encode(text, (matching or options)[0]) if text else []


def _control_text_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Finds where a control token's name starts, for the names that `encode` takes as control."""
    special_tokens = getattr(tokenizer, "special_tokens", None) or {}
    names = [
        name
        for name, token in special_tokens.items()
        if len(name) > 1 and token in tokenizer.encode(name, add_bos=False, add_eos=False)
    ]
    if isinstance(tokenizer, HFTokenizer):
        names.append(HFTokenizer.CUT)  # which would vanish
    if not names:
        return None
    # A lookahead, because names may overlap and each must be cut. Some tokenizers have a thousand,
    # of which hardly any place in a text is worth trying.
    first = "".join(re.escape(letter) for letter in {name[0] for name in names})
    return re.compile(f"(?=[{first}])(?={'|'.join(map(re.escape, names))})")
