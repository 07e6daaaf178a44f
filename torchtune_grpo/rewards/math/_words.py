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
    caught brought sent wrote written drank grew laid built held came went met put cut cost need use
    save earn work walk weigh remain hit answer result total solution sum so therefore thus hence
    then him her them us me it you with for in at by worth together away out down back usd eur gbp
    inr cad aud jpy cny
""")
_BEFORE_VERBS = _words("to will can must would should did does they we you i")
# Though they look like verbs; and these verbs, whatever their ending.
_NO_OPENINGS = _words("""
    across as besides during including less minus plus times unless versus vs yes towards afterwards
    within beyond past near exceed surpass top topp approach miss lack round double triple quadruple
    halv square cube divide multipli multiply differ precede limit bound cap push
""")
_QUANTITIES = _words("""
    total sum profit loss change discount average mean cost price tip salary rate speed length width
    height weight distance area volume age amount number value balance remainder difference score
    capacity increase decrease bonus commission answer result payment temperature
""")
_REACHING = _words("""
    equal equals equivalent add adds added amount amounts amounted come comes came sum sums total
    totals work works
""")
_OPENING_PAIRS = {"of": _QUANTITIES, "to": _REACHING}
# Change nothing between an opening and its number.
_PASSED_OVER = _words("""
    a an the only just exactly precisely also still now altogether currently extra additional
""")

# Spoil a number that they lead in or follow.
_SPOILERS = _words("""
    not cannot cant isnt arent wasnt werent dont doesnt didnt wont wouldnt shouldnt couldnt hasnt
    havent hadnt aint no non nor never none nothing nope nah neither without untrue mistake mistaken
    mistakenly error erroneous wrongly incorrectly falsely deny denies denied reject rejected refuse
    fails failed lie lies joke joking kidding anything but except excepting excluding exclude
    excludes excluded unlike contrary opposite inverse reciprocal hardly barely scarcely ignore
    instead rather far disproved inaccurate ruled cancel scratch disregard discard dismiss dismissed
    debunked myth unable

    or either and/or maybe perhaps probably possibly presumably apparently seemingly seem seems
    seemed appear appears approximately approx approximate approximated roughly circa nearly almost
    unlikely might may could guess guessed guessing think thinks thought believe believes suppose
    supposedly assume assumes assuming suspect estimate estimated estimates estimation unsure
    uncertain doubt doubtful unclear undetermined undefined dunno idk whichever whether depends
    depending alternatively alternative otherwise range ranges ranging between ish kinda sorta
    somewhat something somewhere hopefully if unless try trying hmm hm wait unsolved ballpark
    several few plausible too whatever randomly tentative tentatively conceivably potentially
    arguably allegedly reportedly hypothetically exceed exceeding bound bounds

    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty thirty forty fourty fifty sixty seventy eighty ninety
    hundred hundreds thousand thousands million millions billion billions trillion trillions
    quadrillion dozen dozens lakh lakhs crore crores myriad googol half halves thirds fourths fifths
    sixths sevenths eighths ninths tenths hundredth hundredths thousandth thousandths millionth
    millionths plus minus divided multiplied subtract subtracted modulo mod squareroot sqrt root
    factorial exponent twice thrice lambda log ln exp sin cos tan pi tau inf infinity infinite nan
""")
# So do these, but "72 wrong answers" are 72.
_ADJECTIVES = _words("""
    wrong incorrect false invalid fake negative double doubled triple tripled quadruple quadrupled
    random possible potential probable likely unknown impossible imaginary different
""")
_DIRECTIONS = _words("about around over under above below up upward upwards to some than")
_RIGHT_BEHIND = _DIRECTIONS | _words("""
    and squared cubed odd score gross grand mil mln mn mio bn tn thou st nd rd th ths fold base
    choose
""")
_ASKING = _words("""
    is are was were am do does did can could will would should has have had shall what why who how
""")

# One letter behind a number is a unit only if it is one of these: "12k", "12x" and "12i" are other
# numbers. "a" is the article of "12 a day".
_ONE_LETTER_UNITS = frozenset("mgshlLtVWANJCFΩa")


def _fold(word: str) -> str:
    """The word in lower case, without accents, so that nobody hides a "not" behind one."""
    decomposed = unicodedata.normalize("NFKD", word.replace("’", "'").casefold())
    return "".join(c for c in decomposed if not unicodedata.combining(c)).replace("ø", "o")


def _spoils(folded: Sequence[str], index: int) -> bool:
    """Whether the word at ``index`` spoils a number from anywhere before or behind it."""
    word = folded[index]
    if word in ("most", "least"):  # "at the very least", but "the most money"
        return "at" in folded[:index]
    last_part = word.rpartition("-")[2]  # "twenty-one", but "two-way"
    return word.endswith("n't") or last_part in _SPOILERS or last_part in _ADJECTIVES


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
    for index in range(len(folded)):
        if _spoils(folded, index) and not (index > 0 and words[index] == "May"):
            return False
    return not right_before or _opens(folded)


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
    for index, word in enumerate(words):
        if len(word) == 1 and word not in _ONE_LETTER_UNITS:
            return False
        if _spoils(folded, index) and not (index > 0 and word == "May"):
            return False
    return True
