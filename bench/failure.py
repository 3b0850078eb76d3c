"""When a measurement is worth nothing."""


class BenchFailure(Exception):
    """What was to be measured did not happen. The text is for people."""
