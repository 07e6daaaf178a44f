"""Which words may stand around a number that is given as an answer.

Right before it only few may: what looks like a verb ("Natalia sold 72"), and a short list of
openings ("a total of 72"). Elsewhere words are open ("Natalia", "72 apples"), unless they are known
to take the number back, to blur it, or to make another number of it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# May stand right before a number, as what looks like a verb may.
_OPENINGS = _words("""
    am are be been were had have do did make made sell sold spend spent pay paid buy bought take
    took taken get got eat ate eaten give gave given read ran run drove lost kept left won saw found
    caught brought sent wrote grew built laid held came went met put cut cost need use save earn
    work walk weigh remain answer result total solution sum so therefore thus hence then him her
    them us me it you with for in at by worth together away out down back usd eur gbp inr cad aud
    jpy cny
""")
_BEFORE_VERBS = _words("to will can must would should did does they we you i")
# Though they look like verbs; and these verbs, whatever their ending.
_NO_OPENINGS = _words("""
    across as besides during less minus plus times versus yes towards within beyond past near exceed
    surpass top topp approach miss lack round double triple square halv divide multipli differ limit
    push
""")
_OPENING_PAIRS = {
    "of": _words("""
        total sum profit loss change discount average cost price tip speed length width height
        weight distance area volume age amount number value balance remainder score result answer
    """),
    "to": _words("equal equals equivalent add adds amount amounts amounted come comes came sums"),
}
# Change nothing between an opening and its number.
_PASSED_OVER = _words("a an the only just exactly precisely also still now altogether additional")

# Spoil a number that they lead in or follow, but "72 wrong answers" are 72.
_ADJECTIVES = _words("""
    wrong incorrect false invalid fake negative double doubled triple tripled quadruple quadrupled
    random possible potential probable likely unknown impossible imaginary different
""")
# So do these, wherever they stand.
_SPOILERS = _ADJECTIVES | _words("""
    not cannot cant wont aint no non nor never none nothing nope nah neither without untrue mistake
    error wrongly incorrectly falsely deny reject refuse fails failed lie joke anything but except
    excluding excluded unlike opposite inverse reciprocal hardly ignore instead rather far ruled
    disregard discard dismiss myth unable or either maybe perhaps probably possibly presumably
    apparently seemingly seem seems appear appears approximately approx roughly nearly almost
    unlikely might may could guess guessed think thinks thought believe suppose supposedly assume
    assuming suspect estimate estimated unsure uncertain doubt doubtful unclear dunno idk whether
    depends alternative otherwise between ish somewhat something hopefully if unless try hmm wait
    ballpark several few too whatever potentially allegedly hypothetically bound zero one two three
    four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds
    thousand thousands million millions billion billions trillion trillions dozen dozens lakh lakhs
    crore crores half halves thirds fourths fifths sixths sevenths eighths ninths tenths hundredths
    thousandths plus minus root factorial twice thrice lambda log pi tau inf infinity nan
""")
_DIRECTIONS = _words("about around over under above below up upward upwards to some than")
_RIGHT_BEHIND = _DIRECTIONS | _words("""
    and squared cubed odd score gross max maximum minimum tops grand mil mln mn mio bn tn thou st nd
    rd th ths fold base choose
""")
_ASKING = _words("is are was were do does did can could will would should has have had what who")

# One letter behind a number is a unit only if it is one of these: "12k", "12x" and "12i" are other
# numbers. "a" is the article of "12 a day".
_ONE_LETTER_UNITS = frozenset("mgshlLtVWANJCFΩa")


def _fold(word: str) -> str:
    """The word in lower case, without accents, so that nobody hides a "not" behind one."""
    decomposed = unicodedata.normalize("NFKD", word.replace("’", "'").casefold())
    return "".join(c for c in decomposed if not unicodedata.combining(c)).replace("ø", "o")


def _spoiled(words: Sequence[str], folded: Sequence[str]) -> bool:
    """Whether one of the words spoils a number from anywhere before or behind it."""
    for index, word in enumerate(folded):
        if words[index] == "May" and index > 0:
            continue
        if word in ("most", "least") and "at" in folded[:index]:
            return True  # "at the very least", but "the most money"
        if word.endswith("n't") or (word.endswith("nt") and word[:-2] in _ASKING):
            return True
        if word.rpartition("-")[2] in _SPOILERS:  # "twenty-one", but "two-way"
            return True
    return False


def _opens(folded: Sequence[str]) -> bool:
    """Whether a number may stand right behind these words."""
    left = list(folded)
    while left and left[-1] in _PASSED_OVER:
        left.pop()
    if not left:
        return True
    last = left.pop()
    if last in _OPENING_PAIRS:
        if left[-1:] in (["up"], ["out"]):  # "adds up to"
            left.pop()
        return bool(left) and left[-1] in _OPENING_PAIRS[last]
    stems = {last.removesuffix(ending) for ending in ("", "s", "es", "ed", "d", "ing")}
    if last in _DIRECTIONS or "-" in last or not _NO_OPENINGS.isdisjoint(stems):
        return False
    is_verb = last.endswith(("s", "ed", "ing")) or not _BEFORE_VERBS.isdisjoint(left[-1:])
    return is_verb or last in _OPENINGS


def lead_is_harmless(words: Sequence[str], *, right_before: bool = True) -> bool:
    """Whether a number keeps its value and its certainty behind ``words`` ("The answer is").

    Args:
        words (Sequence[str]): what stands before the number.
        right_before (bool): whether no comma, colon or equals sign stands between.
    """
    folded = [_fold(word) for word in words]
    if "than" in folded or (len(folded) > 1 and folded[0] in _ASKING):
        return False
    if _spoiled(words, folded):
        return False
    return _opens(folded) if right_before else _DIRECTIONS.isdisjoint(folded[-1:])


def tail_is_harmless(words: Sequence[str], *, priced: bool = False, unit: bool = False) -> bool:
    """Whether a number keeps its value and its certainty before ``words`` ("apples a day").

    Args:
        words (Sequence[str]): what stands behind the number.
        priced (bool): whether the number has a currency sign, which then is its unit.
        unit (bool): whether the first two words stand right behind it ("wrong answers").
    """
    folded = [_fold(word) for word in words]
    if folded and folded[0] in _RIGHT_BEHIND:
        return False
    if folded[1:2] == ["than"] and not priced:  # "12 more than the answer"
        return False
    if unit and folded[0] in _ADJECTIVES and words[1].endswith("s") and len(words[1]) > 4:
        folded[0] = ""
    if any(len(word) == 1 and word not in _ONE_LETTER_UNITS for word in words):
        return False
    return not _spoiled(words, folded)
