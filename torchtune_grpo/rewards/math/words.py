"""Which words may stand around a number that is given as an answer.

Both sides must be known, so that a way to blur a number is refused before anybody thought of it.
Before the number stands a label, or a sentence that hands over to it with an everyday verb. Behind
it stands its unit, which is a plural, and then what begins with a known link ("per day", "in the
basket"). Names and nouns in between are open, but for words that deny, blur or change a number.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Whoever speaks of the answer itself says no more than this: no "half the answer is".
_ANSWERS = _words("answer answers result correct right")
_FRAME = _ANSWERS | _words("""
    so therefore thus hence then finally altogether overall yes a the my your our final exact total
    is are was must be will equals equal equivalent to we have get it it's its this that that's
    which gives means conclude solution
""")
# What numbers are named by: "a profit of 72", "Total cost: 72".
_QUANTITIES = _ANSWERS | _words("""
    total sum solution product difference quotient remainder balance number amount count value price
    cost profit loss change discount tip speed rate length width height depth weight distance area
    volume perimeter age score time average mean us usd eur gbp inr cad aud jpy cny rs
""")
_BE = _words("is are was were be it's that's he's she's there's")
_VERBS = _words("""
    has have had does did made paid laid meant spent sold bought took taken got ate eaten gave given
    ran drove lost kept left won saw seen found caught brought sent wrote written grew grown built
    held came went met drank rode slept swam fed drew threw broke wore carri studi add answer attend
    bake break bring build burn buy carry catch charge climb collect come complete consume contain
    contribute cook cost count cover cut deliver deposit do donate draw drink drive drop earn eat
    end equal feed fill find finish fold gain gather get give go grow harvest hit hold increase
    invest keep last leave lose make mean measure meet need open order owe own pack paint pass pay
    pick place plant play practice produce purchase put raise read reach receive reduce remain
    require ride run save score see sell send serve share sleep solve spend start study swim take
    throw total trade travel use visit walk wash watch wear weigh win work write rain
""")
_AFTER_VERBS = _words("for in into at by with her him them us me you away out down back up")
_PASSED_OVER = _words("a an the only just exactly precisely also still now additional another each")
_BEFORE_TO = _words("""
    has have had needs need able equal equals equivalent adds amounts amounted come comes came sums
""")
_PRONOUNS = _words("it it's he she they we you i there")
_ASKING = _words("is are was were do does did can will would should has have had what who")

_PREPOSITIONS = _words("in on for from by with at")
_STARTS = _PREPOSITIONS | _FRAME
_STARTS |= _words("after since when every each together and now because all today combined")
_OBJECTS = _words("the these those his her their its it he she they")
_LINKS = _PREPOSITIONS | _OBJECTS
_LINKS |= _words("a an per each every of to than is are was were will can must that who which when")
_LINKS |= _words("after during this")
_ENDS = _words("""
    left total altogether together overall combined remaining remain remained more extra each away
    apiece apart worth now back old tall long wide high deep today tonight tomorrow
""")
_MEASURES = _words("""
    feet sheep geese mice teeth dice pence percent am pm mph mm cm km μm in ft yd mi mg kg lb oz ml
    mb gb kw kwh hz min usd eur gbp inr cad aud jpy cny
""")
# One letter behind a number is a unit if it is one of these: "12k" is another number.
_ONE_LETTER_UNITS = frozenset("mgshlLtVWANJCFΩ")

_FIRST_PERSON = _words("i we you me us my our your")
_REFUSED = _words("""
    no not nor never none nothing nobody neither without but except unless if whether although
    though or either until till rather instead unlike like maybe perhaps almost quite about past
    under off once ago versus vs might may could cannot too few half plus minus twice let's tops
    thereabouts
""")
_FORMS = re.compile(
    "seem|appear|fails|depend|.{4,}ly$|.*wards?$|.*n't$|(is|are|was|were|do|does|did|ca|wo|would)nt$"
)
_CERTAIN = _words("finally exactly precisely weekly monthly family equally currently multiply")
# These spoil a number, but "72 wrong answers" are 72.
_STEMS = re.compile(
    "wrong|incorrect|false|mistak|error|impossib|possib|probab|guess|estim|approx|rough$|suppos"
    "|round(s|ed|ing)?$|assum|doubt|claim|think|thought|say|said|deny|deni|reject|refus|exclu|former"
    "|previous|maxim|minim|limit|bound|outside|oppos|negat|inver|doubl|tripl|halv|multipl(e|ied)$|divided"
)
_NUMERAL = re.compile(
    "(.*-)?(zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen"
    "|(twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|[a-z]+illion|dozen|lakh|crore)s?$"
    "|.*-quarters?$|(.*-)?(hal[fv]e?s?|thirds|[a-z]*(our|if|six|ven|igh|nin|ten|elf|een|tie|red|and|illion)?ths)$"
)
# "and rising", and one bare noun behind a preposition: "in theory", but not "in May", "in boxes".
_BARE = "all|total|change|profit|food|home|both|now|one|" + "|".join(_LINKS)
_LOOSE_END = re.compile(
    r"(^|\s)(to be|less (?!than)|and (?![A-Z]|(?!\S*ing\b)\S*s\b)"
    rf"|({'|'.join(_PREPOSITIONS)})($| (?![A-Z]|\S*(s|ing)\b|({_BARE})\b)\S+( ({_BARE})\b|$)))"
)


def _fold(word: str) -> str:
    """The word in lower case, without accents, so that nobody hides a "not" behind one."""
    decomposed = unicodedata.normalize("NFKD", word.replace("’", "'").casefold())
    return "".join(c for c in decomposed if not unicodedata.combining(c)).replace("ø", "o")


def changes_number(word: str, *, in_unit: bool = False) -> bool:
    """Whether a word, perhaps of the number's unit, denies, blurs or changes it, also from afar."""
    folded = _fold(word)
    if word[:1].isupper() and (folded == "may" or folded.endswith("ly")):
        return False  # a month or a name
    if len(word) == 1 and word != "a":
        return word not in _ONE_LETTER_UNITS
    if folded in _REFUSED or (_NUMERAL if in_unit else _STEMS).match(folded):
        return True
    return folded not in _CERTAIN and bool(_FORMS.match(folded))


def _is_verb(word: str) -> bool:
    stems = {word.removesuffix(ending) for ending in ("", "s", "es", "ed", "d", "ing")}
    for ending in ("ed", "ing"):
        if word.endswith(ending):  # planned, making
            stems |= {word[: -len(ending) - 1], word.removesuffix(ending) + "e"}
    return not _VERBS.isdisjoint(stems)


def _is_plural(word: str) -> bool:
    """Whether a word names what is counted: a plural, or a measure."""
    if len(word) == 1:
        return word in _ONE_LETTER_UNITS
    folded = _fold(word).removesuffix("'")
    if folded.endswith(("people", "children", "men", "fish")) or folded in _MEASURES:
        return True
    plural = len(folded) > 2 and folded.endswith("s") and not folded.endswith(("ss", "ous"))
    return plural and folded not in _LINKS


def lead_is_harmless(words: Sequence[str], mark: str) -> bool:
    """Whether a number keeps its value and its certainty behind ``words`` ("The answer is").

    Args:
        words (Sequence[str]): what stands before the number.
        mark (str): ``","``, ``":"`` or ``"="`` between them and the number, else empty.
    """
    folded = [_fold(word) for word in words]
    if any(changes_number(word) for word in [*folded[:1], *words[1:]] if len(word) > 1):
        return False
    if not _ANSWERS.isdisjoint(folded) and not _FRAME.issuperset(folded):
        return False
    if mark == "," and folded:
        return folded[0] in _STARTS and not _LOOSE_END.search(" ".join(words))
    if mark and folded:
        named = any(word in _QUANTITIES | {"left"} or _is_plural(word) for word in folded)
        return named or _FRAME.issuperset(folded) or (mark == "=" and len(folded[-1]) == 1)
    while folded and folded[-1] in _PASSED_OVER:
        folded.pop()
    if len(folded) > 1 and words[len(folded) - 1][0].isupper():
        folded[-1] = "him"  # "It took Bo 72 days"
    return not folded or _hands_over(folded)


def _hands_over(words: list[str]) -> bool:
    """Whether a number may stand right behind these words, of which there is one at least."""
    *before, last = words
    second, first = ["", "", *before][-2:]
    if (before and words[0] in _ASKING) or ("would", "have") in pairwise(before):
        return False
    if last == "to":
        return (second if first in ("up", "out") else first) in _BEFORE_TO
    if last == "of":
        return first in _QUANTITIES
    if last in _BE or _is_verb(last):
        hoped = first == "to" and second and second not in _BEFORE_TO  # "hopes to sell"
        return not hoped and _states_itself(words)
    if last in _AFTER_VERBS and any(map(_is_verb, before)):
        return first not in _PREPOSITIONS
    return last in _FRAME | _QUANTITIES or last == "worth"


def _states_itself(words: list[str]) -> bool:
    """Whether a pronoun's sentence is nobody's opinion, as in "Bo thinks it is"."""
    pronoun = max((i for i, word in enumerate(words) if word in _PRONOUNS), default=0)
    verbs = sum(word in _BE or _is_verb(word) for word in words[pronoun + 1 :])
    if not pronoun or verbs > 1:  # "the most that she earns is"
        return True
    return words[0] in _STARTS or words[0].endswith("ing")


def tail_is_harmless(
    words: Sequence[str], *, has_unit: bool = False, apposed: bool = False, small: bool = False
) -> bool:
    """Whether a number keeps its value and its certainty before ``words`` ("apples a day").

    Args:
        words (Sequence[str]): what stands behind the number.
        has_unit (bool): whether the number has a unit already, such as a currency sign.
        apposed (bool): whether a comma or a bracket stands between.
        small (bool): whether one of what is counted, or a part of it, so that it has no plural.
    """
    width = _unit_width(words, has_unit=has_unit, small=small)
    rest = [_fold(word) for word in words[width:]]
    if any(changes_number(word, in_unit=True) for word in words[:width]):
        return False
    if any(map(changes_number, words if apposed else words[width:])):
        return False
    if _FRAME.issuperset(rest):
        return True  # "72 is the answer"
    loose = _LOOSE_END.search(" ".join(words[width:]))
    if loose or not (_FIRST_PERSON | _ANSWERS).isdisjoint(rest):
        return False
    first, second, third = [*rest, "", ""][:3]
    if width or has_unit:
        known = _LINKS - _OBJECTS | _ENDS | _words("around less squared and")
        named = words[width][0].isupper() or (has_unit and first in _QUANTITIES)
        return named or first in known or first.endswith(("er", "ing")) or _is_verb(first)
    if "than" in rest or any(map(_NUMERAL.match, rest)):
        return False
    if first in _ENDS:
        return second in _LINKS | _ENDS | {"", "over"}
    if first in _PREPOSITIONS and second in _OBJECTS | {"a", "an"}:
        return third == "end"
    return first in _LINKS - _BE - _OBJECTS - {"to"}


def _unit_width(words: Sequence[str], *, has_unit: bool, small: bool) -> int:
    """How many of the words right behind a number are its unit: up to the first plural."""
    for index, word in enumerate(words):
        if _fold(word) in _LINKS or (word == "and" and not index):
            break
        plural = _is_plural(word) and not (has_unit and len(word) < 3)
        if plural or (small and _fold(word) not in _ENDS):
            return index + 1
    return 0
