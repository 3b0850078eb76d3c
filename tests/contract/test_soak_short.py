"""The soak, in short; the full one is ``make soak``."""

from __future__ import annotations

import pytest

from tests.soak.run import soak


@pytest.mark.parametrize("seed", [1])
async def test_a_short_soak_finds_nothing_wrong(seed: int) -> None:
    result = await soak(seed, turns=300, conversations=30)
    assert not result.wrong, f"{result}: again by `make soak SEED={seed} TURNS=300`\n" + "\n".join(result.wrong)
    assert result.counts["hit"] + result.counts["partial"] > 20
