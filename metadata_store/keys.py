"""Keys: derived from caller, model and conversation id, so that nobody can name another's entry."""

import hashlib


def conversation_key(secret: bytes, caller: str | None, model: str, conversation_id: str) -> str:
    """A keyed hash, as hex. ``caller`` is the credential the request came with, None if it had none.

    Nothing of the three can be read from it, nor can a key be computed without ``secret``.
    """
    digest = hashlib.blake2b(key=secret, digest_size=16, person=b"turnback-key")
    for part in (
        b"" if caller is None else b"caller:" + caller.encode(),
        model.encode(),
        conversation_id.encode(),
    ):
        # Lengths first, so that ("ab", "c") and ("a", "bc") differ.
        digest.update(len(part).to_bytes(4, "big"))
        digest.update(part)
    return digest.hexdigest()


def derive_secret(text: str) -> bytes:
    """32 bytes of key from a setting of any length."""
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"turnback-secret").digest()
