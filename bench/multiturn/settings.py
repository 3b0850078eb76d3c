"""Every setting of `turnback bench`, once: command line > environment (``TURNBACK_BENCH_*``) > default."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, CliApp, CliVariadicArg, NoDecode, SettingsConfigDict, SettingsError

from bench.failure import BenchFailure
from bench.multiturn.distribution import distribution

Lengths = Annotated[CliVariadicArg[list[int]], NoDecode]
FROM_FILES = ("sharegpt", "mooncake", "bailian", "sessions")


class WrongSettings(BenchFailure):
    """Settings that cannot be used; the message is one line and names the setting."""


class BenchSettings(BaseSettings):
    """Serve multi-turn conversations and tell what they took. Lengths, numbers of turns and pauses are N, LOW..HIGH,
    exp:MEAN or lognormal:MEDIAN:SIGMA. Every option is also a variable: TURNBACK_BENCH_ and its name."""

    model_config = SettingsConfigDict(
        env_prefix="TURNBACK_BENCH_",
        extra="forbid",
        frozen=True,
        cli_prog_name="turnback bench",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    url: str = Field(default="http://127.0.0.1:8000", description="the server: a Turnback router, or any OpenAI API")
    model: str | None = Field(default=None, description="name of the model; by default the first that is served")
    api_key: SecretStr | None = Field(default=None, description="sent as the client's key")
    admin_key: SecretStr | None = Field(
        default=None,
        description="admin_key of a Turnback router: every turn is served twice, with reuse and without",
    )
    vllm: bool | None = Field(
        default=None,
        description="whether min_tokens and cache_salt may be sent, which only vLLM knows; by default found out",
    )

    workload: Literal["synthetic", "sharegpt", "mooncake", "bailian", "sessions"] = Field(
        default="synthetic", description="what is said"
    )
    file: Path | None = Field(default=None, description="the ShareGPT or trace file, or the folder of sessions")
    conversations: int = Field(default=8, ge=1, description="how many; with contexts, how many of each")
    min_turns: int = Field(default=2, ge=1, description="shorter conversations of a file are passed over")
    history: Literal["generated", "recorded"] = Field(
        default="generated",
        description="answers that go into the history: those of this run, or those of the recording",
    )
    turns: str = Field(default="4", description="synthetic: turns of a conversation")
    system_tokens: str = Field(default="500", description="synthetic: length of the system prompt")
    tool_tokens: str = Field(default="300", description="synthetic: length of what is said before each answer")
    answer_tokens: str = Field(default="64", description="synthetic: length of an answer")
    contexts: Lengths = Field(
        default=[],
        description="synthetic: tokens that second prompts have, instead of a system prompt: 2000 4000 8000 …",
    )
    pause: str = Field(default="0", description="seconds between an answer and the next request, but in traces")
    pause_scale: float = Field(default=1.0, ge=0, description="times every pause")
    time_scale: float = Field(default=1.0, ge=0, description="times all times of a trace")
    max_pause: float = Field(default=60.0, ge=0, description="seconds; longer pauses are cut to that")
    max_answer: int = Field(default=512, ge=1, description="tokens; longer answers are cut to that")
    max_context: int | None = Field(
        default=None,
        ge=1,
        description="tokens of prompt and answer after which a conversation is cut off; by default what the model can",
    )

    concurrency: int = Field(default=1, ge=1, description="conversations at once")
    repeat: int = Field(default=1, ge=1, description="times that all of it is done")
    seed: int = Field(default=0, description="of everything that is drawn")
    warm_up: int = Field(default=2, ge=0, description="conversations before those that count")
    temperature: float = Field(default=0.0, ge=0, description="0: always the most likely token")
    timeout: float = Field(default=600.0, gt=0, description="seconds for a turn")
    ttl: float | None = Field(default=None, gt=0, description="seconds: the router's decoder_kv_blocks_ttl")
    past_ttl: int = Field(
        default=0, ge=0, description="conversations that go on after ttl, when nothing may be reused any more"
    )
    delete_ended: bool = Field(
        default=False, description="tell the router when a conversation is over, so that it holds nothing of it"
    )
    poll: float = Field(default=1.0, gt=0, description="seconds between two looks at what the router holds")
    require_equal: bool = Field(default=False, description="exit with 1 if answers with and without reuse differ")
    output: Path = Field(default=Path("turnback-bench"), description="where results go: NAME.json and NAME.html")

    @field_validator("contexts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """One text with commas or spaces, as environment variables have it, or a list of such."""
        parts = [value] if isinstance(value, str) else value
        return [
            piece for part in parts for piece in (part.replace(",", " ").split() if isinstance(part, str) else [part])
        ]

    @field_validator("contexts")
    @classmethod
    def _lengths(cls, contexts: list[int]) -> list[int]:
        if any(context < 1 for context in contexts):
            raise ValueError("lengths are above 0")
        return list(dict.fromkeys(contexts))

    @field_validator("url")
    @classmethod
    def _server(cls, url: str) -> str:
        parts = urlsplit(url)
        # First, since what follows quotes the URL.
        if "@" in url:
            raise ValueError("a credential goes into api_key, not into the URL")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not like http://HOST:PORT")
        return url.rstrip("/").removesuffix("/v1")

    @field_validator("output")
    @classmethod
    def _two_files(cls, output: Path) -> Path:
        """Without the ending of either file. That it cannot be written is said before the run, as far as is known."""
        named = output.with_suffix("") if output.suffix in (".json", ".html") else output
        if named.name in ("", ".."):
            raise ValueError(f"{output} names no file")
        if not named.parent.is_dir():
            raise ValueError(f"there is no folder {named.parent}")
        return named

    @field_validator("turns", "system_tokens", "tool_tokens", "answer_tokens", "pause")
    @classmethod
    def _drawn(cls, text: str) -> str:
        distribution(text)
        return text

    @field_validator("api_key", "admin_key", "model", mode="before")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        """An empty variable is one that is not set."""
        return None if value == "" else value

    @model_validator(mode="after")
    def _fit_together(self) -> BenchSettings:
        if self.workload in FROM_FILES and self.file is None:
            raise ValueError(f"file: {self.workload} needs one")
        if self.workload not in FROM_FILES and self.file is not None:
            raise ValueError(
                f"file: workload is {self.workload}, which reads none; one of {', '.join(FROM_FILES)} does"
            )
        if self.contexts and self.workload != "synthetic":
            raise ValueError("contexts: only for the synthetic workload")
        if self.history == "recorded" and self.workload not in ("sharegpt", "sessions"):
            raise ValueError(f"history: answers are not recorded in {self.workload}")
        if self.past_ttl and self.ttl is None:
            raise ValueError("past_ttl: needs ttl, the time that must pass")
        return self

    @property
    def compares(self) -> bool:
        """Whether every turn is served with reuse and without."""
        return self.admin_key is not None


def load(arguments: Sequence[str]) -> BenchSettings:
    """The settings that ``arguments`` (of ``turnback bench``) and the environment give.

    Raises ``WrongSettings``; ends the process for ``--help`` and unknown options, as argparse does.
    """
    try:
        return CliApp.run(BenchSettings, cli_args=list(arguments))
    except ValidationError as error:
        raise WrongSettings("; ".join(dict.fromkeys(_one_line(found) for found in error.errors()))) from error
    except SettingsError as error:
        raise WrongSettings(" ".join(str(error).split())) from error


def shown(settings: BenchSettings) -> dict[str, Any]:
    """``settings`` for a report: no keys."""
    return settings.model_dump(mode="json", exclude={"api_key", "admin_key"})


def _one_line(found: Any) -> str:
    message = found["msg"].removeprefix("Value error, ")
    place = ".".join(str(part) for part in found["loc"])
    return f"{place}: {message}" if place else message
