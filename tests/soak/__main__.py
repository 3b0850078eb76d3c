"""``python -m tests.soak``."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time

from tests.soak.run import soak


def main() -> int:
    """0 if nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--turns", type=int, default=10_000)
    arguments = parser.parse_args()
    print(f"soak: seed {arguments.seed}, {arguments.turns} turns", flush=True)
    begin = time.monotonic()
    result = asyncio.run(soak(arguments.seed, arguments.turns))
    print(f"{result}; {time.monotonic() - begin:.0f} s")
    for what in result.wrong:
        print(f"  {what}")
    if result.wrong:
        print(f"{len(result.wrong)} wrong. Again: make soak SEED={arguments.seed} TURNS={arguments.turns}")
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
