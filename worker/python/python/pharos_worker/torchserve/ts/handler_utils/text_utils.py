"""Splits texts into words like torchtext's `basic_english`."""

import itertools
import re

_SPACED = re.compile(r"([.,()!?'])")
_REMOVED = re.compile(r'"')
_BLANK = re.compile(r"<br />|[;:]")


def ngrams_iterator(token_list, ngrams):
    """Yields the tokens, then pairs of neighbors joined by a space, and so on up to `ngrams` tokens."""
    runs = (
        " ".join(token_list[at : at + length])
        for length in range(2, ngrams + 1)
        for at in range(len(token_list) - length + 1)
    )
    return itertools.chain(token_list, runs)


def _basic_english(line):
    line = _BLANK.sub(" ", line.lower())
    return _SPACED.sub(r" \1 ", _REMOVED.sub("", line)).split()


def get_tokenizer(tokenizer, language="en"):
    """Returns a function that splits a text into words: at spaces for None, `basic_english`, or the given function."""
    if tokenizer is None:
        return str.split
    if callable(tokenizer):
        return tokenizer
    if tokenizer != "basic_english":
        raise ValueError(f"the tokenizer is '{tokenizer}'; allowed are None, 'basic_english' and a function")
    if language != "en":
        raise ValueError(f"the language of basic_english is 'en', not '{language}'")
    return _basic_english
