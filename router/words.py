"""Words that decisions are told in: in code, as labels of metrics, in headers and in the log the same."""

from enum import StrEnum


class Word(StrEnum):
    """One of a few words, and in every way the text that it is."""

    # A text's own, which it knows once it was asked: an enum's is computed in Python for each look into a dict, and
    # differs from the hash of a text that it equals.
    __hash__ = str.__hash__
