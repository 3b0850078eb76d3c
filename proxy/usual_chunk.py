"""The event that nearly all of a stream consists of: some text and its token ids, nothing else that matters.

Its ids are cut out of the bytes, without reading the JSON: at a tenth of the time, and the rest stays as it came.
That is safe since what is looked for has quotes that inside of a JSON string would be escaped: it can only be members,
one after the other. Whatever is not exactly as expected is left to the full reading.
"""

import re

_USUAL = re.compile(
    rb'(data: \{[^\n]*"finish_reason":null(?:,"stop_reason":null)?)(?:,"prompt_token_ids":null)?'
    rb',"token_ids":\[(\d+(?:,\d+)*)\]([^\n]*)\n\n'
)
_NOTHING_SAID = (b',"prompt_token_ids":null', b',"kv_transfer_params":null')


def without_ids(event: bytes) -> tuple[bytes, list[int]] | None:
    """``event`` without its token ids, and those; None if it is no usual one."""
    found = _USUAL.fullmatch(event)
    if found is None:
        return None
    before, ids, after = found.groups()
    # A chunk for its ids alone, and ids of the prompt.
    if b'"delta":{}' in before or b'_ids":' in before or b"kv_transfer_params" in before:
        return None
    if b"prompt_token_ids" in after or b"kv_transfer_params" in after:
        for null in _NOTHING_SAID:
            after = after.replace(null, b"", 1)
        if b"prompt_token_ids" in after or b"kv_transfer_params" in after:
            return None
    return b"%b%b\n\n" % (before, after), [int(token) for token in ids.split(b",")]
