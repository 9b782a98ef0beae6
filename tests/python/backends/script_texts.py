"""Texts of many scripts, of code points that Unicode assigns: words, numbers, marks, spaces of every kind, controls, emoji.

The same seed makes the same texts, with one version of Python: `unicodedata` of a later version knows more code points.
"""

import random
import unicodedata
from functools import partial

SCRIPTS = {
    "Latin": [(0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x1E00, 0x1EFF)],
    "Greek": [(0x370, 0x3FF), (0x1F00, 0x1FFF)],
    "Cyrillic": [(0x400, 0x52F)],
    "Armenian": [(0x531, 0x58F)],
    "Hebrew": [(0x591, 0x5F4), (0xFB1D, 0xFB4F)],
    "Arabic": [(0x600, 0x6FF), (0x750, 0x77F), (0xFE70, 0xFEFC)],
    "Syriac": [(0x700, 0x74F)],
    "Thaana": [(0x780, 0x7B1)],
    "Devanagari": [(0x900, 0x97F)],
    "Bengali": [(0x980, 0x9FE)],
    "Gurmukhi": [(0xA01, 0xA76)],
    "Gujarati": [(0xA81, 0xAFF)],
    "Tamil": [(0xB82, 0xBFA)],
    "Telugu": [(0xC00, 0xC7F)],
    "Kannada": [(0xC80, 0xCF2)],
    "Malayalam": [(0xD00, 0xD7F)],
    "Sinhala": [(0xD81, 0xDF4)],
    "Thai": [(0xE01, 0xE5B)],
    "Lao": [(0xE81, 0xEDF)],
    "Tibetan": [(0xF00, 0xFDA)],
    "Myanmar": [(0x1000, 0x109F)],
    "Georgian": [(0x10A0, 0x10FF), (0x1C90, 0x1CBF)],
    "Hangul": [(0xAC00, 0xACFF), (0x1100, 0x11FF), (0x3131, 0x318E)],
    "Ethiopic": [(0x1200, 0x137C)],
    "Cherokee": [(0x13A0, 0x13FD), (0xAB70, 0xABBF)],
    "Khmer": [(0x1780, 0x17F9)],
    "Mongolian": [(0x1800, 0x18AA)],
    "Hiragana": [(0x3041, 0x309F)],
    "Katakana": [(0x30A0, 0x30FF), (0xFF66, 0xFF9F)],
    "Han": [(0x4E00, 0x4EFF), (0x3400, 0x343F), (0x20000, 0x2003F), (0xF900, 0xF91F)],
    "Gothic": [(0x10330, 0x1034A)],
    "Adlam": [(0x1E900, 0x1E959)],
    "Cuneiform": [(0x12000, 0x1203F)],
}
"""The code points of each script, in part: a vocabulary of some thousand tokens has most of them."""
SPACES = [
    " ", "  ", "   ", "\t", "\n", "\n\n", "\r", "\r\n", " \t ", " \n ", "\x0b", "\x0c", "\x1c", "\x1f", "\x85", "\xa0", "\u1680",
    "\u2000", "\u2002", "\u2003", "\u2007", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", "\u180e", "\u200b",
    "\u2060", "\ufeff",
]  # fmt: skip
"""White space of Unicode, and characters that look like it or have been it."""
EMOJI = [
    "😀", "👍🏽", "👩\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "🇩🇪", "🇩🇪🇫🇷", "🇩", "1\ufe0f\u20e3", "❤\ufe0f", "❤", "🧑🏿\u200d🚀",
    "☝🏻", "👁\ufe0f\u200d🗨\ufe0f", "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "\u200d", "\ufe0f", "🏻",
]  # fmt: skip
"""Joined ones, flags, tones of skin, key caps, and parts of them."""
ODD = [
    # Directions of writing.
    "\u202eabc\u202c", "\u202a", "\u2066שלום\u2069", "\u200e", "\u200f", "\u061c",
    # Joiners, marks without a letter, many marks, and an order of marks that NFC changes.
    "\u200c", "\u200d", "\u034f", "\u0301", "e\u0301\u0327\u0323", "a" + "\u0300" * 20, "\u0915\u094d\u200d\u0937", "\u1100\u1161\u11a8",
    # Letters that change in number with their case or their form.
    "İi", "ẞß", "ǅ", "ﬁ", "ﷺ", "Å", "①", "½", "ǰ", "Σς", "㌀", "ｶﾞ", "\u0149",
    # Private use, no characters, and what replaces a surrogate without its other half.
    "\ue000", "\uf8ff", "\U000f0000", "\U0010fffd", "\ufffe", "\uffff", "\U0001ffff", "\U0010ffff", "\ufdd0", "\ufffd", "a\ufffdb",
    # Not assigned.
    "\u0378", "\u05ff", "\U0003fffd", "\U000e0080",
    # Controls.
    "\x00", "a\x00b", "\x01", "\x08", "\x1b[0m", "\x7f", "\x80", "\x9f", "\xad", "\U000e0001",
    # What tokenizers themselves write, and special tokens.
    "##a", "\u2581", "\u2581a", "Ġ", "Ċa", "[CLS]", "[MASK]", " [SEP] ", "[mask]", "<s>", " <mask> ", "</s>", "<unk>", "<0x41>",
    # Apostrophes, of which some patterns make tokens.
    "it's", "IT'S", "we'll", "o’clock", "don't", "'ſ", "'K",
]  # fmt: skip
"""What some tokenizers treat differently from words."""
FORMS = [str, str, str, str.lower, str.upper, str.title]
FORMS += [partial(unicodedata.normalize, form) for form in ("NFC", "NFD", "NFKC", "NFKD")]
"""What becomes of a word."""


class Script:
    """The code points of a script, and some words of it, which return."""

    def __init__(self, ranges: list, source: random.Random):
        found = [chr(code) for first, last in ranges for code in range(first, last + 1)]
        kinds = {one: unicodedata.category(one) for one in found}
        self.letters = [one for one, kind in kinds.items() if kind[0] == "L"]
        self.marks = [one for one, kind in kinds.items() if kind[0] == "M"]
        self.digits = [one for one, kind in kinds.items() if kind[0] == "N"] or list("0123456789")
        self.others = [one for one, kind in kinds.items() if kind[0] in "PSZ" or kind == "Cf"] or list(".,;:!?-()")
        self.words = [self.word(source) for _ in range(40)]

    def word(self, source: random.Random) -> str:
        """Returns letters, of which some have marks."""
        parts = []
        for _ in range(source.randint(1, 7)):
            parts.append(source.choice(self.letters))
            while self.marks and source.random() < 0.3:
                parts.append(source.choice(self.marks))
        return "".join(parts)

    def number(self, source: random.Random) -> str:
        """Returns a number in digits of the script or others."""
        digits = source.choice([self.digits, "0123456789"])
        return source.choice(["", "-", "$", "№"]) + source.choice(["", ".", ",", " ", "/"]).join(
            "".join(source.choices(digits, k=source.randint(1, 4))) for _ in range(source.randint(1, 3))
        )

    def part(self, source: random.Random) -> str:
        """Returns a word of those that return, a new one, a number or a sign."""
        chance = source.random()
        if chance < 0.65:
            return source.choice(FORMS)(source.choice(self.words))
        if chance < 0.8:
            return source.choice(FORMS)(self.word(source))
        return self.number(source) if chance < 0.9 else source.choice(self.others) * source.choice([1, 1, 1, 3])


def beyond(source: random.Random) -> str:
    """Returns a code point of any plane, mostly of four bytes; it may be not assigned, but is no surrogate."""
    code = source.choice([source.randrange(0x10000, 0x20000), source.randrange(0x20000, 0x110000), source.randrange(0xD800)])
    return chr(code)


def script_texts(number: int, seed: int, odd: bool = True) -> list:
    """Returns this many texts. The first ones have each odd sequence and each space by itself; the others are in one script, or in up
    to three. `odd`: whether they have odd sequences and rare code points too."""
    source = random.Random("scripts")
    scripts = {name: Script(ranges, source) for name, ranges in SCRIPTS.items()}
    source = random.Random(seed)
    texts = [*ODD, *EMOJI, *SPACES, *(f"a{space}b" for space in SPACES)] if odd else []
    while len(texts) < number:
        own = source.sample(list(scripts.values()), source.choice([1, 1, 1, 2, 3]))
        parts = []
        for _ in range(source.randint(1, 8)):
            chance = source.random()
            if chance < 0.85 or not odd:
                parts.append(source.choice(own).part(source))
            elif chance < 0.98:
                parts.append(source.choice(source.choice([ODD, EMOJI])))
            else:
                parts.append(beyond(source))
            chance = source.random()
            parts.append("" if chance < 0.15 else " " if chance < 0.75 else source.choice(SPACES))
        texts.append("".join(parts if source.random() < 0.2 else parts[:-1]))
    return texts
