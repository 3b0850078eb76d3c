"""Stops sending real traffic to a worker that keeps failing it, whatever its health probe says."""


class Breaker:
    """Closed: all legs go through. Open, after ``failures`` in a row: none, for ``seconds``.

    Then half open: one leg at a time is let through as a trial. Its success closes the breaker, its
    failure opens it again; a trial that tells nothing (the client went away) makes room for another.
    """

    def __init__(self, *, failures: int = 3, seconds: float = 10.0) -> None:
        self._limit = failures
        self._seconds = seconds
        self._failures = 0
        self._opened_until: float | None = None
        self._trying = False

    @property
    def closed(self) -> bool:
        """Whether all legs go through."""
        return self._opened_until is None

    def allows(self, now: float) -> bool:
        """Whether a leg may be sent at ``now`` (seconds, on the clock of all calls)."""
        return self._opened_until is None or (now >= self._opened_until and not self._trying)

    def begin(self, now: float) -> bool:
        """A leg is sent. True if it is the trial: then ``trial_over`` must be called when it has ended."""
        if self._opened_until is None or not self.allows(now):
            return False
        self._trying = True
        return True

    def trial_over(self) -> None:
        """The trial has ended; what it told was told before."""
        self._trying = False

    def succeeded(self) -> None:
        """The worker served a leg."""
        self._failures = 0
        self._opened_until = None

    def failed(self, now: float) -> None:
        """The worker did not answer a leg, or with a 5xx.

        Legs that were under way when it opened fail late, and tell nothing new.
        """
        self._failures += 1
        waiting = self._opened_until is not None and now < self._opened_until
        if self._failures >= self._limit and not waiting:
            self._opened_until = now + self._seconds
