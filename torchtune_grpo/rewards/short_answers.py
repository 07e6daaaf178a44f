"""Rewards for multiple choice and for short texts; whatever the text, they raise nothing."""

import re
from collections.abc import Callable
from typing import Any
from unicodedata import normalize

from torchtune_grpo.config.text import shortened
from torchtune_grpo.rewards.math import LONGEST, agreed
from torchtune_grpo.rewards.reward import F, declares

_COMMAND = re.compile(r"\\(?:text|math|boxed)[a-z]*\s*\{")
# B. or b) where a line or an item starts, and (B) anywhere, but not P(A).
_START = r"(?:^(?:[Oo]ption )?\(?|or |and |, )"
_LABEL = re.compile(rf"(?m){_START}[A-Ja-j][).:\]](?!\w)|(?<!\w\()\b[A-HJ][)\]]")
_LETTER = re.compile(r"(?<![\w'’.+-])[A-J](?![\w'’+#-]|\.[A-Z]\b)|^(?:[Oo]ption )?[a-j]$")
# A negated letter, and the article or the pronoun before a word.
_NO_LETTER = re.compile(r"\b[Nn]ot \(?[A-J]\b|(?<!ption )\b[AI] (?!and\b|or\b|is\b)(?=\w\w)")
_WORD = re.compile(r"(?!and\b|or\b)\b\w\w|\w\(")
_MARKS = "*_`\"'“”$\\(){} "


def read_letter(content: str) -> str | None:
    """Read the one letter that an answer states, else None."""
    unmarked = re.sub(r'[*_`"“”$\\{}]', "", _COMMAND.sub("", normalize("NFKC", content)))
    stated = re.split(" because | since ", unmarked.strip().rstrip("."))[0]
    stated = _NO_LETTER.sub("", stated)
    found, rest = _LABEL.findall(stated), _LABEL.sub("", stated)
    is_labelled_text = _LABEL.match(stated) and _WORD.search(rest)
    if not is_labelled_text:  # "B. Vitamin C" is, and its C is no answer
        found += _LETTER.findall(rest)
    letters = {label.strip("().:]")[-1].upper() for label in found}
    return letters.pop() if len(letters) == 1 else None


def read_text(content: str) -> str | None:
    """Return a text without case, markup, quotes, final punctuation and leading article."""
    folded = _COMMAND.sub("", normalize("NFKC", content)).casefold().replace("’", "'")
    folded = " ".join(folded.split()).strip(_MARKS).rstrip(_MARKS + ".,;:!?。")
    return re.sub("^(?:an?|the) ", "", folded).strip(_MARKS) or None


def _golds(gold: object, read: Callable[[str], str | None]) -> set[str | None]:
    """Return the readings of a gold, or of a list of golds."""
    texts = gold if isinstance(gold, (list, tuple)) else [gold]
    return {read(t) for t in texts if isinstance(t, str) and len(t) <= LONGEST} - {None}


def _scores(
    completions: list[str], answer: list[Any], read: Callable[[str], str | None]
) -> list[float]:
    pairs = zip(completions, answer, strict=True)
    return [float(agreed(text, read) in _golds(gold, read)) for text, gold in pairs]


def _compares(read: Callable[[str], str | None]) -> Callable[[F], F]:
    """Declare a reward for answers and golds that ``read`` reads."""

    def fault(*, answer: object) -> str | None:
        return None if _golds(answer, read) else f"answer={shortened(repr(answer))} is no answer"

    return declares(
        reads_text=True,
        decides=True,
        check_row=fault,
        answer_of=lambda text: agreed(text, read),
    )


@_compares(read_letter)
def choice_reward(
    prompts: list[str], completions: list[str], *, answer: list[Any], **columns: Any
) -> list[float]:
    """Score 1.0 for an answer that states the gold's letter, A to J, and no other."""
    return _scores(completions, answer, read_letter)


@_compares(read_text)
def short_text_reward(
    prompts: list[str], completions: list[str], *, answer: list[Any], **columns: Any
) -> list[float]:
    """Score 1.0 for an answer that is the gold, or one of a list of golds."""
    return _scores(completions, answer, read_text)
