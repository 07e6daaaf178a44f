"""Rewards for multiple choice and for short texts; whatever the text, they raise nothing."""

import re
from collections.abc import Callable
from unicodedata import normalize

from torchtune_grpo.config.text import shortened
from torchtune_grpo.rewards.math import LONGEST, agreed
from torchtune_grpo.rewards.reward import F, declares

_COMMAND = re.compile(r"\\(?:text|math|boxed)[a-z]*\s*\{")
# B. or b) where a line or an item starts, and (B) anywhere, but not P(A).
_START = r"(?:^(?:[Oo]ption )?\(?|or |and |, )"
_LABEL = re.compile(rf"(?m){_START}[A-Ja-j][).:\]](?!\w)|(?<!\w\()(?<!°)\b[A-HJ][)\]]")
_LETTER = re.compile(r"(?<![\w'’.+°-])[A-J](?![\w'’+#-]|\.[A-Z]\b)|^(?:[Oo]ption )?[a-j]$")
# A negated letter, and the article or the pronoun before a word.
_NO_LETTER = re.compile(r"\b[Nn]ot \(?[A-J]\b|(?<!ption )\b[AI] (?!and\b|or\b|is\b)(?=\w\w)")
# A line without a mark is a choice if it begins with the letter, or names it as one.
_NAMES_LETTER = re.compile(
    r"^(?:[Oo]ption )?\(?[A-Ja-j](?:[).:\]]|$)"
    r"|\b(?i:answer|option|choice|choose|pick|select)\b[ :(is]*[A-J]\b"
)
_DENIES = re.compile(r"(?i)n['’]t\b|\b(?:not?|never|neither|nor|wrong|incorrect|except)\b")
_WORD = re.compile(r"(?!and\b|or\b)\b\w\w|\w\(|^ *-?[0-9.,]+ ?[A-J]$")  # or "5 J"
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


def read_bare_letter(content: str) -> str | None:
    """Read the letter of a reply that is one line: "100 °C" and "Vitamin B" are no choices."""
    line = re.sub(r'[*_`"“”$\\{}]', "", _COMMAND.sub("", content)).strip()
    is_choice = _NAMES_LETTER.search(line) and not _DENIES.search(line)
    return read_letter(content) if is_choice else None


def read_text(content: str) -> str | None:
    """Return a text without case, markup, quotes, final punctuation and leading article."""
    folded = _COMMAND.sub("", normalize("NFKC", content)).casefold().replace("’", "'")
    folded = " ".join(folded.split()).strip(_MARKS).rstrip(_MARKS + ".,;:!?。")
    return re.sub("^(?:an?|the) ", "", folded).strip(_MARKS) or None


def _golds(gold: object, read: Callable[[str], str | None]) -> set[str | None]:
    """Return the readings of a gold, or of a list of golds."""
    texts = gold if isinstance(gold, (list, tuple)) else [gold]
    return {read(t) for t in texts if isinstance(t, str) and len(t) <= LONGEST} - {None}


def _compares(
    read: Callable[[str], str | None], answer_of: Callable[[str], str | None], *, wanted: str
) -> Callable[[F], F]:
    """Declare a reward for golds that ``read`` reads, and completions that ``answer_of`` does."""

    def fault(*, answer: object) -> str | None:
        return None if _golds(answer, read) else f"answer={shortened(repr(answer))}: give {wanted}"

    return declares(reads="text", decides=True, check_row=fault, answer_of=answer_of)


def _stated_letter(text: str) -> str | None:
    return agreed(text, read_letter, read_bare=read_bare_letter)


def _stated_text(text: str) -> str | None:
    return agreed(text, read_text)


@_compares(read_letter, _stated_letter, wanted="a letter, not an index or the option's text")
def choice_reward(
    prompts: list[str], completions: list[str], *, answer: list[object], **columns: object
) -> list[float]:
    """Score 1.0 for an answer that states the gold's letter, A to J, and no other."""
    pairs = zip(completions, answer, strict=True)
    return [float(_stated_letter(text) in _golds(gold, read_letter)) for text, gold in pairs]


@_compares(read_text, _stated_text, wanted="a text, or a list of texts")
def short_text_reward(
    prompts: list[str], completions: list[str], *, answer: list[object], **columns: object
) -> list[float]:
    """Score 1.0 for an answer that is the gold, or one of a list of golds."""
    pairs = zip(completions, answer, strict=True)
    return [float(_stated_text(text) in _golds(gold, read_text)) for text, gold in pairs]
