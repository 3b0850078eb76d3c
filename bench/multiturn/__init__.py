"""Multi-turn conversations, with and without reuse: `turnback bench`."""
