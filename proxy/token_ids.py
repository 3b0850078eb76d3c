"""A prompt's token ids, as numbers and as JSON."""

from functools import cached_property

import msgspec

_numbers = msgspec.json.Decoder(list[int]).decode


class TokenIds:
    """Either form is made from the other when it is first asked for: a long prompt has a megabyte of them."""

    def __init__(self, json: msgspec.Raw) -> None:
        """``json``: an array. What it has in it is looked at by ``numbers``."""
        self.json = json

    @classmethod
    def read(cls, json: msgspec.Raw) -> "TokenIds":
        """From an array that is looked at right now. Raises ``msgspec.DecodeError`` like ``numbers``."""
        ids = cls.of(_numbers(json))
        ids.json = json
        return ids

    @classmethod
    def of(cls, numbers: list[int]) -> "TokenIds":
        """From the ids themselves."""
        ids = cls.__new__(cls)
        ids.numbers = numbers
        return ids

    @cached_property
    def json(self) -> msgspec.Raw:
        """An array, as bytes."""
        return msgspec.Raw(msgspec.json.encode(self.numbers))

    @cached_property
    def numbers(self) -> list[int]:
        """The ids. Raises ``msgspec.DecodeError`` if the array is not one of whole numbers."""
        return _numbers(self.json)

    def are(self, json: msgspec.Raw) -> bool:
        """Whether ``json`` tells the same ids; what is no array of whole numbers does not."""
        # Nearly always told in the same way by the same engine: then nothing needs to be read.
        if self.json == json:
            return True
        try:
            return self.numbers == _numbers(json)
        except msgspec.DecodeError:
            return False
