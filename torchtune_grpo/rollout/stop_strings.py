"""Finds the token that completes a stop string, wherever the token borders lie."""

from __future__ import annotations

from collections.abc import Sequence

from torchtune_grpo.rollout.request import Decode


class StopStrings:
    """Looks for stop strings in the text of a response's last tokens.

    Args:
        strings (Sequence[str]): none of them empty.
        decode (Decode): token ids to text.
    """

    # Tokens in front of the longest stop string, so that cutting a text at a token border (half a
    # character, a swallowed leading space) cannot change what the string itself is decoded to.
    _MARGIN = 4

    def __init__(self, strings: Sequence[str], *, decode: Decode) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        # A token stands for at least one byte.
        self._window = max(len(s.encode()) for s in strings) + self._MARGIN

    def end(self, tokens: Sequence[int], *, start: int) -> int | None:
        """The first length above ``start`` at which a response's last token completes a string."""
        for length in range(start + 1, len(tokens) + 1):
            window = tokens[max(0, length - self._window) : length]
            text = self._decode(window)
            found = [string for string in self._strings if string in text]
            if not found:
                continue
            before = self._decode(window[:-1])
            if any(text.count(string) > before.count(string) for string in found):
                return length
        return None
