"""Whether a decode worker lets go of blocks sooner than the router was told."""

FAILURES_THAT_TELL = 3


class TtlWatch:
    """Watches reuses of one decode worker that the router believed to be in time.

    Reuses that keep failing although younger than the TTL we were told, while younger ones still
    succeed, mean that the engine's own TTL is shorter.
    """

    def __init__(self) -> None:
        self._oldest_good = 0.0
        self._youngest_bad = 0.0
        self._failures = 0

    def succeeded(self, age: float) -> None:
        """A reuse of blocks ``age`` seconds old worked."""
        self._oldest_good = max(self._oldest_good, age)
        if age >= self._youngest_bad:
            self._failures = 0

    def failed(self, age: float) -> float | None:
        """A reuse of blocks ``age`` seconds old failed.

        Returns the youngest age in an unbroken row of failures that are all older than any success, as
        soon as, and each time that, the row is long enough to tell; else None.
        """
        if age <= self._oldest_good:
            # Older blocks were read before: this is no matter of age.
            self._failures = 0
            return None
        self._youngest_bad = min(age, self._youngest_bad) if self._failures else age
        self._failures += 1
        if self._failures % FAILURES_THAT_TELL:
            return None
        return self._youngest_bad
