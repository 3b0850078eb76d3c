"""The picture of the page in the README: ``python -m tests.picture [URL]``.

With the URL of a router, its page as it is now; without, that of a router in front of simulated workers, after some
conversations made here.
"""

from __future__ import annotations

import argparse
import asyncio

import httpx
from PIL import Image
from playwright.async_api import expect

from deploy.local.layout import PROJECT
from tests.chromium import chromium
from tests.contract.answers import CHAT, OPENING, chat, chunks_of, joined, user
from tests.contract.command import serving
from tests.running import GENEROUS

_PICTURE = PROJECT / "docs/dashboard.png"
_WORKERS = {"prefill_seconds_per_token": 0.0002, "prefix_caching": False, "num_blocks": 8192}
_LENGTHS = (700, 1500, 3000, 6000)
"""Of first prompts, in tokens, about."""
_CONVERSATIONS = 6
"""Of each length."""
_TURNS = 3


async def take(url: str) -> None:
    """A picture of the page of the router at ``url``."""
    async with chromium() as browser:
        page = await browser.new_page(viewport={"width": 1180, "height": 1090}, color_scheme="light")
        await page.goto(f"{url}/dashboard")
        await expect(page.locator("#newest tbody tr").first).to_be_visible()
        _PICTURE.parent.mkdir(exist_ok=True)
        await page.screenshot(path=_PICTURE)
    # A third of the size, and the eye sees no difference.
    with Image.open(_PICTURE) as picture:
        few_colors = picture.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    few_colors.save(_PICTURE, optimize=True)
    print(f"{_PICTURE}: {_PICTURE.stat().st_size:,} bytes")


async def talk(url: str) -> None:
    """Conversations of several lengths, and some single questions."""
    async with httpx.AsyncClient(base_url=url, timeout=GENEROUS) as client:
        for number in range(_CONVERSATIONS):
            for length in _LENGTHS:
                messages = [user((OPENING * (length // len(OPENING) + 1))[:length])]
                for _ in range(_TURNS):
                    headers = {"x-conversation-id": f"{length}-{number}"}
                    response = await client.post(CHAT, json=chat(messages, stream=True), headers=headers)
                    answer = joined(chunks_of(response.text), CHAT)
                    messages += [{name: value for name, value in answer.items() if value is not None}, user("Go on.")]
            await client.post(CHAT, json=chat([user(OPENING)], stream=True))


async def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.picture", description="Make the README's picture.")
    parser.add_argument("url", nargs="?", help="a router that has served turns; without, one is made")
    url = parser.parse_args().url
    if url is not None:
        await take(url.rstrip("/"))
        return
    async with serving(**_WORKERS) as command:
        await talk(command.url)
        await take(command.url)


if __name__ == "__main__":
    asyncio.run(main())
