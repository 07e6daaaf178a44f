"""Prompt text -> the tokens that a model continues, in a tokenizer's chat format or as plain text.

The chat format is the tokenizer's own. What differs between torchtune's tokenizers is found out by
asking them, once, how they write a short reply: with which tokens they close an assistant turn (not
all can be told to leave it open), and whether a reply's first word gets SentencePiece's leading
space (Llama 2 and Mistral: yes; Phi-3: no).
"""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

from torchtune.data import Message

# Any two texts would do that share no tokens.
_PROBE_PROMPT, _PROBE_REPLY = "a", "b"


class PromptEncoder:
    """Encodes prompts so that the next token is the first one of the response.

    In chat format that is: system message, user message, an assistant turn opened and not closed,
    prefill. As plain text: beginning-of-sequence token (if the tokenizer has one), then system
    prompt and an empty line, prompt and prefill as one string.

    The text of control tokens inside a prompt ("<|im_end|>") is encoded as ordinary text, so data
    cannot end a turn. Llama 3's tokenizer does so itself; Qwen 2's does not, so there such text is
    handed over in pieces. ``system_prompt`` and ``prefill`` stand in the config and are left to the
    tokenizer. SentencePiece models may hold user-defined symbols that the tokenizer does not list
    in ``special_tokens``; these are not found.

    Prompts are never cut: ``tokenizer.max_seq_len``, at which torchtune would silently cut, is
    switched off in a copy of the tokenizer.

    Args:
        tokenizer: a torchtune model tokenizer.
        chat: chat format if True, plain text if False.
        system_prompt: text of the system message. None or "" for none.
        prefill: text that the response is made to begin with. White space in it is kept.

    Raises:
        ValueError: if the tokenizer marks no turns, or takes no system message.
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
        self._prefill = prefill
        self._chat = chat
        self._control_text = _control_text_pattern(self._tokenizer)
        if chat:
            self._num_closing, self._prefill_tokens = self._probe_reply()
            self._check_system_prompt()

    def __call__(self, prompt: str) -> list[int]:
        """Returns the tokens of one prompt, prefill included."""
        if not self._chat:
            return self._plain_tokens(prompt)
        tokens = self._chat_tokens(prompt, self._system_prompt)
        return tokens[: len(tokens) - self._num_closing] + self._prefill_tokens

    def _plain_tokens(self, prompt: str) -> list[int]:
        pieces = self._pieces(prompt)
        if self._system_prompt:
            pieces[0] = f"{self._system_prompt}\n\n{pieces[0]}"
        pieces[-1] += self._prefill
        tokens = self._tokenizer.encode(pieces[0], add_bos=True, add_eos=False)
        for piece in pieces[1:]:
            tokens += self._tokenizer.encode(piece, add_bos=False, add_eos=False)
        return tokens

    def _chat_tokens(self, prompt: str, system_prompt: str, reply: str = "") -> list[int]:
        content = [{"type": "text", "content": piece} for piece in self._pieces(prompt)]
        messages = [Message(role="system", content=system_prompt)] if system_prompt else []
        messages += [
            Message(role="user", content=content),
            Message(role="assistant", content=reply),
        ]
        tokens, _ = self._tokenizer.tokenize_messages(messages)
        return tokens

    def _pieces(self, text: str) -> list[str]:
        """Splits text inside every control token's name; tokenizers encode pieces one by one."""
        if self._control_text is None:
            return [text]
        cuts = [match.start() + 1 for match in self._control_text.finditer(text)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def _probe_reply(self) -> tuple[int, list[int]]:
        """How many tokens close an empty reply, and the tokens of the prefill in its place."""
        empty = self._chat_tokens(_PROBE_PROMPT, "")
        reply = self._chat_tokens(_PROBE_PROMPT, "", _PROBE_REPLY)
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
            self._prefill, written=reply[len(opened) : len(reply) - num_closing]
        )

    def _check_system_prompt(self) -> None:
        try:
            self._chat_tokens(_PROBE_PROMPT, self._system_prompt)
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
    names = [
        name
        for name, token in (getattr(tokenizer, "special_tokens", None) or {}).items()
        if len(name) > 1 and token in tokenizer.encode(name, add_bos=False, add_eos=False)
    ]
    # A lookahead, because names may overlap and each must be cut.
    return re.compile(f"(?=({'|'.join(map(re.escape, names))}))") if names else None
