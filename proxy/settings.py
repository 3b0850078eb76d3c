"""Every setting, once: command line > environment (``TURNBACK_*``) > YAML file > default."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliVariadicArg,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from metadata_store import MEMORY, open_store
from metadata_store.keys import derive_secret
from proxy.collector_url import collector_url
from proxy.worker_spec import AnyWorkerSpec, WorkerSpec, server_url
from router.select import Policy

WorkerSpecs = Annotated[CliVariadicArg[list[AnyWorkerSpec]], NoDecode]
Names = Annotated[CliVariadicArg[list[str]], NoDecode]

CONVERSATION_ID_SOURCES = (
    "header:x-conversation-id",
    "body:conversation_id",
    "body:metadata.conversation_id",
    "body:prompt_cache_key",
    "header:x-session-id",
)


class Settings(BaseSettings):
    """What can be set. A field's name is its YAML key; with dashes its option; in capitals its variable."""

    model_config = SettingsConfigDict(
        env_prefix="TURNBACK_",
        extra="forbid",
        frozen=True,
        cli_prog_name="turnback serve",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    prefill: WorkerSpecs = Field(
        default=[], validate_default=True, description="URLs of the prefill workers; #dp=N behind one with N ranks"
    )
    decode: WorkerSpecs = Field(
        default=[], validate_default=True, description="URLs of the decode workers; #dp=N behind one with N ranks"
    )
    render: str | None = Field(
        default=None, description="URL of a render server (vllm launch render); without it the workers render"
    )
    store: str = Field(default="memory://", description="where entries are kept: memory:// or redis://HOST:PORT/DB")
    store_timeout: float = Field(
        default=0.25, gt=0, description="seconds to wait for the store before a turn is served without it"
    )
    store_pause: float = Field(
        default=1.0, ge=0, description="seconds in which a store that just failed is not asked again"
    )
    secret: SecretStr | None = Field(
        default=None,
        description="key of the hashes in the store, the same on all replicas; by default derived from the Redis URL,"
        " or random with the memory store",
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on")
    workers: int = Field(default=1, ge=1, description="processes of this proxy; more than one needs a Redis store")
    config: Path | None = Field(default=None, description="YAML file with any of these settings")
    worker_api_key: SecretStr | None = Field(default=None, description="key sent to every worker")
    forward_authorization: bool = Field(
        default=False, description="send the client's own Authorization to the workers that serve its turn"
    )
    admin_key: SecretStr | None = Field(
        default=None,
        min_length=1,
        description="key for /admin/workers and for the header X-Turnback-Reuse; without one nobody can use them",
    )

    reuse: bool = Field(default=True, description="hand prefill what decode retained")
    decoder_kv_blocks_ttl: float = Field(
        default=480.0,
        gt=0,
        description="seconds for which decode keeps a turn's blocks: the engine's setting",
    )
    decoder_kv_blocks_margin: float = Field(
        default=10.0,
        ge=0,
        description="seconds before the end of that time from which an entry is not used any more",
    )
    kv_recompute_threshold: int = Field(
        default=64,
        ge=0,
        description="tokens below which prefill computes rather than copies: the engine's setting",
    )
    retained_share: float = Field(
        default=0.5, gt=0, le=1, description="share of a decode worker's KV cache that retained blocks may take"
    )
    retained_tokens_budget: int | None = Field(
        default=None, ge=0, description="tokens that may be retained on one decode worker"
    )
    idle_release: float | None = Field(
        default=None, gt=0, description="seconds after which the blocks of an idle conversation are given back"
    )
    retained_watch_interval: float = Field(
        default=5.0, gt=0, description="seconds between two looks at what is retained"
    )
    abandon_grace: float = Field(
        default=10.0,
        ge=0,
        description="seconds after which an engine has surely noticed that a request was given up",
    )
    conversation_id_sources: Names = Field(
        default=list(CONVERSATION_ID_SOURCES),
        description="where the conversation id is looked for, in order: header:NAME, body:MEMBER or body:MEMBER.MEMBER",
    )

    max_body_bytes: int = Field(default=64 * 1024 * 1024, gt=0, description="largest request body, in bytes")
    connect_timeout: float = Field(default=5.0, gt=0, description="seconds to connect to a worker")
    prefill_timeout: float = Field(default=600.0, gt=0, description="seconds for a whole prefill leg")
    first_byte_timeout: float = Field(default=600.0, gt=0, description="seconds until decode begins to answer")
    gap_timeout: float = Field(default=300.0, gt=0, description="seconds between two parts of decode's answer")
    render_timeout: float = Field(
        default=10.0,
        gt=0,
        description="seconds for the prompt's token ids before a turn is served without reuse",
    )
    turn_timeout: float = Field(default=3600.0, gt=0, description="seconds for a whole turn, waiting included")
    max_turns_per_worker: int = Field(
        default=1024,
        ge=0,
        description="turns that each process runs at once for each decode worker that is up; 0: no bound",
    )
    queue_size: int = Field(default=1024, ge=0, description="turns that may wait when so many run; then 429")
    queue_timeout: float = Field(default=30.0, gt=0, description="seconds that a turn waits before it gets 429")
    drain_timeout: float = Field(
        default=120.0, ge=0, description="seconds that running turns have when the process is told to end"
    )
    policy: Policy = Field(default="cache_aware", description="how a worker is chosen among those that are up")
    affinity_factor: float = Field(
        default=1.5,
        ge=1,
        description="times the least loaded worker's load up to which cache_aware keeps to a conversation's worker",
    )
    affinity_slack: int = Field(
        default=32768, ge=0, description="tokens of load on top of that, so that idle workers keep their conversations"
    )
    probe_interval: float = Field(default=2.0, gt=0, description="seconds between two health probes of a worker")
    probe_timeout: float = Field(default=5.0, gt=0, description="seconds after which a health probe has failed")
    health_down_after: int = Field(default=3, ge=1, description="failed probes in a row that take a worker down")
    health_up_after: int = Field(default=2, ge=1, description="good probes in a row that bring it up again")
    breaker_failures: int = Field(
        default=3, ge=1, description="legs in a row that a worker fails before it is sent none for a while"
    )
    breaker_seconds: float = Field(default=10.0, gt=0, description="seconds of that while; then one leg tries it")

    otlp_endpoint: str | None = Field(
        default=None, description="URL of an OTLP/HTTP collector that gets traces of turns, such as http://HOST:4318"
    )
    trace_sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="share of turns that are traced, of those whose clients did not decide"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level logged")
    log_format: Literal["auto", "console", "json"] = Field(
        default="auto", description="form of the log lines; auto: console on a terminal, else json"
    )

    _arguments: tuple[str, ...] = PrivateAttr(default=())

    @field_validator("prefill", "decode", "conversation_id_sources", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """One text with commas, as environment variables have it, or a list of such."""
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, list):
            return value
        return [
            piece.strip() if isinstance(piece, str) else piece
            for part in parts
            for piece in (part.split(",") if isinstance(part, str) else [part])
            if not isinstance(piece, str) or piece.strip()
        ]

    @field_validator("prefill", "decode")
    @classmethod
    def _some_workers(cls, specs: list[WorkerSpec]) -> list[WorkerSpec]:
        if not specs:
            raise ValueError("at least one URL is needed")
        known: dict[str, WorkerSpec] = {}
        for spec in specs:
            if known.setdefault(spec.url, spec) != spec:
                raise ValueError(f"{spec.url} is named twice, each time otherwise")
        return list(known.values())

    @field_validator("render")
    @classmethod
    def _render_url(cls, url: str | None) -> str | None:
        return None if url is None else server_url(url)

    @field_validator("otlp_endpoint")
    @classmethod
    def _collector_url(cls, url: str | None) -> str | None:
        return None if url is None else collector_url(url)

    @field_validator("secret", "worker_api_key", "otlp_endpoint", mode="before")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        """An empty variable is one that is not set."""
        return None if value == "" else value

    @field_validator("store")
    @classmethod
    def _known_store(cls, url: str) -> str:
        open_store(url, timeout=1.0)
        return url

    @field_validator("conversation_id_sources")
    @classmethod
    def _known_sources(cls, sources: list[str]) -> list[str]:
        for source in sources:
            kind, _, name = source.partition(":")
            if kind not in ("header", "body") or not name or name.count(".") > (kind == "body"):
                raise ValueError(f"{source!r} is none of header:NAME, body:MEMBER, body:MEMBER.MEMBER")
        return sources

    @model_validator(mode="after")
    def _fit_together(self) -> "Settings":
        if self.decoder_kv_blocks_margin >= self.decoder_kv_blocks_ttl:
            raise ValueError("decoder_kv_blocks_margin: must be shorter than decoder_kv_blocks_ttl")
        if both := {spec.url for spec in self.prefill} & {spec.url for spec in self.decode}:
            raise ValueError(
                f"decode: {min(both)} is a prefill worker too; a worker reads from others, not from itself"
            )
        if self.workers > 1 and self.store == MEMORY:
            raise ValueError("store: several processes share conversations through Redis only, not memory://")
        return self

    @property
    def secret_key(self) -> bytes:
        """The key of all hashes. Random for ``memory://``: what it protects ends with the process."""
        if self.secret is not None:
            return derive_secret(self.secret.get_secret_value())
        if self.store == MEMORY:
            return secrets.token_bytes(32)
        return derive_secret(self.store)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line that they were read from; empty if from none."""
        return self._arguments

    def read_from(self, arguments: Sequence[str]) -> "Settings":
        """These settings, known to be read from this command line."""
        self._arguments = tuple(arguments)
        return self

    def beyond_the_file(self, name: str) -> bool:
        """Whether the command line or a variable sets ``name``, so that what the file says of it does not count."""
        option, variable = f"--{name.replace('_', '-')}", f"TURNBACK_{name.upper()}"
        given = any(argument.partition("=")[0] == option for argument in self._arguments)
        return given or any(known.upper() == variable for known in os.environ)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Values given to the constructor come last: ``load`` gives the YAML file's."""
        return env_settings, init_settings
