"""Which words may stand around a number that is given as an answer.

Units and sentences are open ("12 apples", "Natalia sold 72 clips"), so words are allowed unless
they are known to take the number back, to blur it, to bound it, or to make another number of it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEGATION = _words("""
    not no non nor never none nothing nope nah neither without cannot cant isnt arent wasnt werent
    dont doesnt didnt wont wouldnt shouldnt couldnt hasnt havent hadnt aint false falsely untrue
    wrong wrongly incorrect incorrectly invalid mistake mistaken mistakenly error erroneous
    erroneously deny denies denied reject rejected refuse refuses fail fails failed lie lies joke
    joking kidding fake anything but except excepting excluding exclude excludes excluded unlike
    contrary opposite inverse reciprocal impossible hardly barely scarcely avoid ignore ignored
    forget instead rather far disproved disprove inaccurate ruled cancel scratch
    disregard discard dismiss dismissed debunked myth unable nicht kein keine pas jamais nunca niet
""")
_HEDGE = _words("""
    or either and/or maybe perhaps probably probable possibly presumably apparently seemingly seem
    seems seemed appear appears approximately approx approximate approximated roughly circa nearly
    almost likely unlikely might may could guess guessed guessing think thinks thought believe
    believes suppose supposedly assume assumes assuming suspect estimate estimated estimates
    estimation unsure uncertain doubt doubtful unclear unknown undetermined undefined dunno idk
    whichever whether depending depends alternatively alternative otherwise range ranges ranging
    between ish kinda sorta somewhat something somewhere hopefully if unless try trying hmm hm wait
    unsolved say ballpark several few plausible oder too whatever random randomly tentative
    tentatively potentially conceivably arguably allegedly reportedly hypothetically
""")
_BOUND = _words("exceed exceeds exceeded exceeding bound bounds bounded")
_OTHER_NUMBER = _words("""
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty thirty forty fourty fifty sixty seventy eighty ninety
    hundred hundreds thousand thousands million millions billion billions trillion trillions
    quadrillion dozen dozens lakh lakhs crore crores myriad googol half halves thirds fourths fifths
    sixths sevenths eighths ninths tenths hundredth hundredths thousandth thousandths millionth
    millionths plus minus negative divided multiplied subtract subtracted modulo mod squareroot sqrt
    root factorial exponent double doubled twice thrice triple tripled quadruple quadrupled log ln
    exp sin cos tan pi tau inf infinity infinite nan imaginary
""")
_CODE = _words("""
    return print printf def lambda import eval exec int float str bool null nil const assert console
    echo let var self
""")
_ANYWHERE = _NEGATION | _HEDGE | _BOUND | _OTHER_NUMBER | _CODE

# These spoil a number that they lead in, but not one that they follow ("12 more pages than Bo").
_IN_LEAD = _words("possible potential different close than")

# These spoil a number only right before it: "over 12", but "12 laps are left over".
_RIGHT_BEFORE = _words("""
    about around over under above below beyond within past near nearing until till before since
    times some other another minimum maximum min max versus vs squared cubed square cube version
    step chapter page question option choice problem section line row equation figure case level
    example part room january february march april may june july august september october november
    december
""")
_RIGHT_BEHIND = _words("""
    and about around over under up to squared cubed some grand mil mln mn mio bn tn thou st nd
    rd th ths fold base choose than
""")
_TRANSPARENT = _words("of the a an")  # "a minimum of 12" is "minimum 12"
_ADDING_UP = _words("add adds added adding sum sums come comes came total totals")
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
    return word.endswith("n't") or not _ANYWHERE.isdisjoint([word, *word.split("-")])


def lead_is_harmless(words: Sequence[str]) -> bool:
    """Whether a number keeps its value and its certainty behind ``words`` ("The answer is")."""
    folded = [_fold(word) for word in words]
    for index, word in enumerate(folded):
        is_month = index > 0 and words[index] == "May"
        if word in _IN_LEAD or (_spoils(folded, index) and not is_month):
            return False
    if len(folded) > 1 and folded[0] in _ASKING:
        return False
    if folded[-2:] == ["up", "to"] and _ADDING_UP.isdisjoint(folded[-3:-2]):
        return False
    while folded and folded[-1] in _TRANSPARENT:
        folded.pop()
    return not folded or folded[-1] not in _RIGHT_BEFORE


def tail_is_harmless(words: Sequence[str], *, priced: bool = False) -> bool:
    """Whether a number keeps its value and its certainty before ``words`` ("apples a day").

    Args:
        words (Sequence[str]): what stands behind the number.
        priced (bool): whether the number has a currency sign, which then is its unit.
    """
    folded = [_fold(word) for word in words]
    if folded and folded[0] in _RIGHT_BEHIND:
        return False
    if folded[1:2] == ["than"] and not priced:  # "12 more than the answer"
        return False
    for index, word in enumerate(words):
        if len(word) == 1 and word not in _ONE_LETTER_UNITS:
            return False
        if _spoils(folded, index) and not (index > 0 and word == "May"):
            return False
    return True
