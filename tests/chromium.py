"""A headless Chromium for the tests of pages: found, and by ``python -m tests.chromium`` installed if it is missing.

The variable ``CHROMIUM`` names another than the first that is found.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator

from playwright.async_api import Browser, async_playwright, expect

from tests.running import GENEROUS

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_PACKAGES = ("chromium", "fonts-dejavu-core")
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    # Nothing but the page under test asks the network for anything.
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_MISSING = (
    f"The tests of the page need Chromium: as root, apt-get install {' '.join(_PACKAGES)};"
    " or name one: CHROMIUM=/path/to/chromium make test"
)


def found() -> str | None:
    """Where it is; None if it is nowhere."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A new one, with nothing of an earlier one's. Fails, and says what to do, if there is none."""
    path = found()
    assert path is not None, _MISSING
    expect.set_options(timeout=GENEROUS * 1000)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        try:
            yield browser
        finally:
            await browser.close()


def main() -> None:
    """Install it where that is possible; else say what to do. The tests tell whether it is there."""
    if found() is not None:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(_MISSING, file=sys.stderr)
        return
    print(f"Installing {' and '.join(_PACKAGES)} for the tests of the page ...", flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for step in (["update"], ["install", "--yes", "--no-install-recommends", *_PACKAGES]):
        if subprocess.run(["apt-get", "-qq", *step], env=environment, stdout=subprocess.DEVNULL).returncode:
            print(f"apt-get {step[0]} failed. {_MISSING}", file=sys.stderr)
            return


if __name__ == "__main__":
    main()
