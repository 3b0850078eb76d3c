"""The chunks that nearly all of a stream consists of: some text and its token ids, nothing else that matters.

Their ids are cut out of the bytes, without reading the JSON: at a tenth of the time, and the rest stays as it came.
That is safe since what is looked for has quotes that inside of a JSON string would be escaped: it can only be members,
one after the other. Whatever is not exactly as expected is left to the full reading.
"""

import re
from collections.abc import Iterator

import msgspec

_BEFORE = rb'data: \{[^\[{}\n]*"choices":\[\{(?:"index":\d+,)?'
_STRING = rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
_SAID = (
    rb'"(?:text":%b|delta":\{"(?:(?:content|reasoning|reasoning_content)":%b'
    rb'|tool_calls":\[\{"index":\d+,"function":\{"arguments":%b\}\}\])\})' % (_STRING, _STRING, _STRING)
)
_EVENT = re.compile(
    rb'((?:(%b)(%b(?:,"logprobs":null)?,"finish_reason":null(?:,"stop_reason":null)?)(?:,"prompt_token_ids":null)?'
    rb',"token_ids":\[(\d+(?:,\d+)*)\]([^\n]*\n\n)'
    rb"|[^\n]*(?:\n[^\n]+)*\n\n))" % (_BEFORE, _SAID)
)
"""A usual event in four pieces, or any other: together, those of one read cost half of what they cost one by one.

Nothing possessive: Python up to 3.11.4 gets that wrong where it stands in groups, and passes over events.
"""

_OPENING = re.compile(
    rb'(%b)"delta":\{"role":"assistant","content":""\},"logprobs":null,"finish_reason":null\}\]' % _BEFORE
)
_PROMPT = b',"prompt_token_ids":'
_AFTER_PROMPT = (b"}\n\n", b',"prompt_text":null}\n\n')

_NULLS = (b',"prompt_token_ids":null', b',"kv_transfer_params":null')
_MATTERS = re.compile(rb'_ids"|kv_transfer_params|"error"|"finish_reason"')


class UsualChunks:
    """Those of one stream. What stands around the text is the same in nearly all of them: it is looked at once."""

    def __init__(self) -> None:
        self._around = (b"", b"")
        self._after: bytes | None = None

    def without_ids(self, events: bytes, ids: list[int]) -> Iterator[tuple[bytes, bytes | None]]:
        """Each of ``events``, and what it is without its token ids, which ``ids`` gets; None if it is no usual one."""
        for event, before, said, told, after in _EVENT.findall(events):
            if before and (before, after) != self._around:
                self._around, self._after = (before, after), _shown(before, after)
            if not before or self._after is None:
                yield event, None
            else:
                if b"," in told:
                    ids.extend(map(int, told.split(b",")))
                else:
                    ids.append(int(told))
                yield event, before + said + self._after


def _shown(before: bytes, after: bytes) -> bytes | None:
    """``after`` without members that say nothing; None if something matters in it, or in ``before``."""
    for null in _NULLS:
        after = after.replace(null, b"", 1)
    return None if _MATTERS.search(before) or _MATTERS.search(after) else after


def is_opening(event: bytes) -> bool:
    """Whether this is how a chat usually begins, before any token: with a role and no text."""
    return _OPENING.match(event) is not None


def without_prompt(event: bytes) -> tuple[bytes, msgspec.Raw] | None:
    """How a chat usually begins, without the prompt's token ids, and those as they came; None if it is anything else.

    The ids may be a megabyte: nothing looks at each of them. An array of anything but numbers, that ends elsewhere
    than at its first bracket, is not followed by what is expected.
    """
    opening = _OPENING.match(event)
    if opening is None or _MATTERS.search(opening[1]):
        return None
    begin = opening.end() + len(_PROMPT)
    end = event.find(b"]", begin) + 1
    if not event.startswith(_PROMPT + b"[", opening.end()) or event[end:] not in _AFTER_PROMPT:
        return None
    return opening[0] + event[end:], msgspec.Raw(event[begin:end])
