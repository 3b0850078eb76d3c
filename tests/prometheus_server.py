"""A real Prometheus server for tests: own port, own folder, scraping once a second."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.local.failure import LocalFailure
from deploy.local.ports import free_port
from deploy.local.process import Process
from tests.debian_prometheus import programs
from tests.running import GENEROUS, eventually


class PrometheusServer:
    """Runs from the beginning of a block (``async with``) to its end."""

    def __init__(self, jobs: Mapping[str, Iterable[str]], rules: Iterable[Path]) -> None:
        """``jobs``: the addresses to scrape, by job; ``rules``: files of rules, evaluated once a second."""
        self._folder = tempfile.TemporaryDirectory(prefix="turnback-prometheus-")
        config = Path(self._folder.name, "prometheus.yml")
        targets = {job: [{"targets": list(addresses)}] for job, addresses in jobs.items()}
        config.write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(file) for file in rules],
                    "scrape_configs": [{"job_name": job, "static_configs": found} for job, found in targets.items()],
                }
            )
        )
        address = f"127.0.0.1:{free_port()}"
        self._log = Path(self._folder.name, "log")
        self._command = (
            *(str(programs().prometheus), f"--config.file={config}", f"--web.listen-address={address}"),
            *(f"--storage.tsdb.path={self._folder.name}/data", "--log.level=warn"),
        )
        self._client = httpx.AsyncClient(base_url=f"http://{address}", timeout=GENEROUS)

    async def __aenter__(self) -> PrometheusServer:
        self._process = Process("prometheus", self._command, log=self._log)
        await eventually(self._ready)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
        self._process.stop()
        self._folder.cleanup()

    async def _ready(self) -> bool:
        if self._process.exit_code is not None:
            raise LocalFailure("Prometheus ended by itself.", self._log)
        try:
            return (await self._client.get("/-/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def values(self, query: str) -> list[float]:
        """What the query gives now, without NaN. ``AssertionError`` if it is not a query."""
        answer = await self._client.post("/api/v1/query", data={"query": query})
        assert answer.status_code == 200, f"{query}: {answer.text}"
        result: list[dict[str, Any]] = answer.json()["data"]["result"]
        return [value for sample in result if not math.isnan(value := float(sample["value"][1]))]

    async def rules(self) -> list[dict[str, Any]]:
        """All rules, as Prometheus has them."""
        groups = (await self._client.get("/api/v1/rules")).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]
