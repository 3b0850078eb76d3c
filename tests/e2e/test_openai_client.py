"""The official client drives the proxy: streaming, tools, several turns."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.e2e.conftest import PATIENCE, Proxies
from tests.e2e.test_conversations import STORY, TOOLS

pytestmark = pytest.mark.e2e


def client(proxies: Proxies, conversation: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{proxies.on.url}/v1",
        api_key="any",
        default_headers={"X-Conversation-Id": conversation},
        timeout=PATIENCE,
        max_retries=0,
    )


async def test_streaming_turns(proxies: Proxies) -> None:
    messages: list[Any] = [{"role": "user", "content": STORY}]
    outcomes = []
    async with client(proxies, "official") as official:
        for turn in range(3):
            raw = await official.chat.completions.with_raw_response.create(
                model="tiny", messages=messages, max_tokens=24, temperature=0, stream=True
            )
            outcomes.append(raw.headers["x-turnback-reuse"])
            text = ""
            reason = None
            async for chunk in raw.parse():
                assert "kv_transfer_params" not in (chunk.model_extra or {})
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
            assert text
            assert reason in ("stop", "length")
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {turn}?"}]
    assert outcomes[0] == "first"
    assert set(outcomes[1:]) <= {"hit", "partial"}


async def test_streamed_tool_calls_and_their_results(proxies: Proxies) -> None:
    messages: list[Any] = [{"role": "user", "content": STORY}]
    async with client(proxies, "official-tools") as official:
        stream = await official.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=TOOLS,  # type: ignore[call-overload]
            tool_choice={"type": "function", "function": {"name": "look_up"}},
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        name = arguments = ""
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or []:
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
        assert name == "look_up"
        assert arguments
        assert usage is not None
        assert usage.completion_tokens > 0
        call = {"id": "call-0", "type": "function", "function": {"name": name, "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call-0", "content": "No such name in the book.\n" * 6},
        ]
        raw = await official.chat.completions.with_raw_response.create(
            model="tiny",
            messages=messages,
            tools=TOOLS,  # type: ignore[arg-type]
            max_tokens=24,
            temperature=0,
        )
        assert raw.headers["x-turnback-reuse"] in ("hit", "partial")
        assert int(raw.headers["x-turnback-reused-tokens"]) >= 64


async def test_errors_are_those_the_client_knows(proxies: Proxies) -> None:
    async with client(proxies, "official-errors") as official:
        with pytest.raises(openai.NotFoundError):
            await official.chat.completions.create(model="none", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError):
            await official.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], temperature=-1
            )
        assert [model.id async for model in await official.models.list()] == ["tiny"]
