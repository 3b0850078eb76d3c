"""The event that nearly all of a stream consists of: some text and its token ids, nothing else that matters.

Its ids are cut out of the bytes, without reading the JSON: at a tenth of the time, and the rest stays as it came.
That is safe since what is looked for has quotes that inside of a JSON string would be escaped: it can only be a member.
Whatever is not exactly as expected is left to the full reading.
"""

_IDS = b',"token_ids":['
_NOTHING_SAID = (b',"prompt_token_ids":null', b',"kv_transfer_params":null')
_UNUSUAL = (b"token_ids", b"kv_transfer_params", b'"error"', b'"delta":{}')


def without_ids(event: bytes) -> tuple[bytes, list[int]] | None:
    """``event``, of one line of data, without its token ids, and those; None if it is no usual one."""
    before, found, after = event.partition(_IDS)
    ids, ended, after = after.partition(b"]")
    rest = before + after
    if not found or not ended or rest.count(b'"finish_reason"') != 1 or b'"finish_reason":null' not in rest:
        return None
    if not event.startswith(b"data:") or event.find(b"\n") != len(event) - 2:
        return None
    for null in _NOTHING_SAID:
        rest = rest.replace(null, b"", 1)
    for mark in _UNUSUAL:
        if mark in rest:
            return None
    try:
        return rest, [int(token) for token in ids.split(b",")]
    except ValueError:
        return None
