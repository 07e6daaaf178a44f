"""The tokens that stand between two turns of the policy: nothing that it sampled is among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from torchtune_grpo.data.chat import marked, marked_message, names_pattern
from torchtune_grpo.models.tokenizer import HFTokenizer
from torchtune_grpo.trajectory import ChatMessage, message

_REMEDY = (
    "Give a template that keeps every turn as it was, as qwen3_training.jinja of the trl package "
    "does: save it as chat_template.jinja in the model's folder."
)


class ReplyEncoder:
    """Encodes messages that follow a turn, up to where the policy's next turn begins.

    That is the difference which they make to the text of the chat template, behind the token that
    ends a turn. The text of any special token in a message is ordinary text.

    ``roles`` are those of the messages to come: ``tool``, ``user`` or both. Raises a ValueError if
    with these the template would write earlier turns in another way than the policy has read and
    written them.
    """

    def __init__(self, tokenizer: HFTokenizer, *, roles: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._pattern = names_pattern(tokenizer.added_tokens)
        self._text = cache(self._text_before)
        for role in roles:
            self._check(role)

    def _check(self, role: str) -> None:
        """Try whether the template keeps a turn when a message of this role follows."""
        begun = self._tokenizer.chat_text([message("user", "a")])
        # A template that writes about thinking is to keep what the policy has thought.
        thinks = "<think>" in self._tokenizer.template and not begun.rstrip().endswith("</think>")
        self._answer = "<think>\na\n</think>\n\nb" if thinks else "b"
        name = "probe" if role == "tool" else None
        before, _ = self._text(name)
        if not before.startswith(begun):
            raise ValueError(f"the chat template changes the beginning of a turn. {_REMEDY}")
        self([message(role, "c") | ({} if name is None else {"name": name})])

    def __call__(self, messages: Sequence[ChatMessage], *, ended: bool = True) -> list[int]:
        """Encode one or more messages; unless a turn has ``ended`` so, with the token for that."""
        before, end = self._text(messages[0].get("name"))
        turns = self._turns(messages[0].get("name"))
        turns += [marked_message(each, self._pattern) for each in messages]
        text = self._tokenizer.chat_text(turns)
        if not text.startswith(before):
            raise ValueError(f"the chat template drops a part of earlier turns. {_REMEDY}")
        return self._encode(text[len(before) - (0 if ended else len(end)) :])

    def inline(self, text: str) -> list[int]:
        """Encode text that goes on within the policy's own message."""
        return self._encode(marked(text, self._pattern))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_bos=False, add_eos=False)

    def _turns(self, name: str | None) -> list[dict[str, object]]:
        """Return a question and a turn; ``name`` is of a tool that it calls."""
        turn = message("assistant", self._answer)
        if name is not None:
            call = {"name": name, "arguments": {}}
            turn["tool_calls"] = [{"type": "function", "function": call}]
        return [message("user", "a"), turn]

    def _text_before(self, name: str | None) -> tuple[str, str]:
        """Return the text of these turns up to the token that ends the last, and its text."""
        text = self._tokenizer.chat_text(self._turns(name), add_generation_prompt=False)
        ends = {text.rfind(each) + len(each): each for each in self._tokenizer.special_tokens}
        end = ends[max(ends)]
        if self._tokenizer.special_tokens[end] not in self._tokenizer.stop_tokens:
            raise ValueError(
                f"the chat template ends a turn with {end!r}, which does not end a response; add "
                "its id to eos_token_id in generation_config.json."
            )
        return text[: max(ends)], end
