"""Whether a worker is up, from its health probes, without flapping."""


class Health:
    """Down after ``down_after`` bad probes in a row, up again after ``up_after`` good ones in a row.

    Before any probe has told, it is neither up nor known to be down. The first good probe of a worker that
    never was down is believed at once: there is nothing that could flap.
    """

    def __init__(self, *, up_after: int = 1, down_after: int = 1) -> None:
        self._up_after = up_after
        self._down_after = down_after
        self._up: bool | None = None
        self._against = 0
        """Probes in a row that contradict the present state."""

    @property
    def up(self) -> bool:
        """Whether it was found up."""
        return self._up is True

    @property
    def down(self) -> bool:
        """Whether it was found down."""
        return self._up is False

    def good(self) -> None:
        """A probe was answered."""
        self._seen(True, 1 if self._up is None else self._up_after)

    def bad(self) -> None:
        """A probe was not answered, or not well."""
        self._seen(False, self._down_after)

    def _seen(self, good: bool, needed: int) -> None:
        if self._up is good:
            self._against = 0
            return
        self._against += 1
        if self._against >= needed:
            self._up, self._against = good, 0
