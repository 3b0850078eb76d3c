"""TTFT of a second turn with and without reuse: the router against the bare protocol."""
