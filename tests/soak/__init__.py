"""A randomised soak: many conversations through two proxies, while everything that can fail does.

``python -m tests.soak --seed 1 --turns 10000``; ``make soak`` does that. See ``run.soak``.
"""
