"""Outcomes, reasons and roles are the texts that they are, in dictionaries too."""

from __future__ import annotations

import pytest

from proxy.release import Why
from router.reuse import Outcome, Reason
from router.words import Word
from router.workers import Role


@pytest.mark.parametrize("words", [Role, Outcome, Reason, Why])
def test_a_word_finds_what_its_text_finds(words: type[Word]) -> None:
    for word in words:
        text = str(word.value)
        by_word: dict[str, int] = {word: 1}
        assert by_word[text] == {text: 1}[word] == 1
        assert {words(str(word.value))} == {word}
