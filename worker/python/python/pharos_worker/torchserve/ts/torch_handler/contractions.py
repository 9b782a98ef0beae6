"""English contractions and their expansions."""

_NOT = (
    "are can could did do does had has have is might must need ought should was were would may dare"
).split()  # fmt: skip
_WHO = "he how i it she that there they we what where who you".split()
_HAVE = "could might must need should would ought may".split()

CONTRACTION_MAP = {
    "ain't": "is not",
    "can't": "cannot",
    "can't've": "cannot have",
    "won't": "will not",
    "won't've": "will not have",
    "shan't": "shall not",
    "shan't've": "shall not have",
    "'cause": "because",
    "i'm": "i am",
    "let's": "let us",
    "ma'am": "madam",
    "o'clock": "of the clock",
    "so's": "so as",
    "so've": "so have",
    "to've": "to have",
    "will've": "will have",
    "y'all": "you all",
    "when's": "when is",
    "when've": "when have",
    "why's": "why is",
    "why've": "why have",
    "how'd'y": "how do you",
    "how'd": "how did",
    "where'd": "where did",
}
for _word in _NOT:
    CONTRACTION_MAP.setdefault(f"{_word}n't", f"{_word} not")
    CONTRACTION_MAP.setdefault(f"{_word}n't've", f"{_word} not have")
for _word in _HAVE:
    CONTRACTION_MAP.setdefault(f"{_word}'ve", f"{_word} have")
for _word in _WHO:
    for _short, _long in {"'d": "would", "'d've": "would have", "'ll": "will", "'ll've": "will have", "'ve": "have"}.items():
        CONTRACTION_MAP.setdefault(_word + _short, f"{_word} {_long}")
    _verb = {"i": None, "they": None, "we": None, "you": None}.get(_word, "is")
    if _verb:
        CONTRACTION_MAP.setdefault(f"{_word}'s", f"{_word} is")
for _word in ("they", "we", "you", "who", "what"):
    CONTRACTION_MAP.setdefault(f"{_word}'re", f"{_word} are")
