"""Whether a request is served with reuse: the operator's setting, or for a comparison what its own header says."""

from collections.abc import Mapping
from hmac import compare_digest

from proxy.errors import bad_request, forbidden
from proxy.settings import Settings

REUSE_HEADER = "x-turnback-reuse"
KEY_HEADER = "x-turnback-admin-key"

_WORDS = {"on": True, "off": False}


class ReuseSwitch:
    """Off and on by a header, for those who have the admin key: both kinds of turns then see the same workers."""

    def __init__(self, settings: Settings) -> None:
        self._usual = settings.reuse
        self._key = None if settings.admin_key is None else settings.admin_key.get_secret_value().encode()

    def reuse(self, headers: Mapping[str, str]) -> bool:
        """``headers`` by their names in small letters. Raises ``ApiError``: 403 without the key, 400 for another word.

        Not ignored: whoever compares would take two equal runs for two different ones.
        """
        word = headers.get(REUSE_HEADER)
        if word is None:
            return self._usual
        if self._key is None:
            raise forbidden(f"The header {REUSE_HEADER} is for a router with an admin_key, and this one has none.")
        if not compare_digest(headers.get(KEY_HEADER, "").encode("latin-1"), self._key):
            raise forbidden(f"The header {REUSE_HEADER} takes the router's admin_key in {KEY_HEADER}.")
        if word not in _WORDS:
            raise bad_request(f"The header {REUSE_HEADER} is on or off.", REUSE_HEADER)
        return _WORDS[word]
