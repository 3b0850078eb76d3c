"""The programs `prometheus` and `promtool`: those on the PATH, else those of Debian's package, unpacked."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from deploy.local.failure import LocalFailure
from deploy.local.layout import Layout
from deploy.local.stamp import exclusive

_NAMES = ("prometheus", "promtool")


@dataclass(frozen=True)
class Programs:
    """Where they are."""

    prometheus: Path
    promtool: Path


def programs() -> Programs:
    """Have both; `LocalFailure` if they cannot be had. Whoever fetches them at the same time is waited for."""
    on_path = [shutil.which(name) for name in _NAMES]
    if all(on_path):
        return Programs(*(Path(str(found)) for found in on_path))
    folder = Layout.default().directory / "prometheus"
    with exclusive(folder.with_name("prometheus.lock")):
        if not folder.exists():
            _fetch(folder)
    return Programs(*(folder / name for name in _NAMES))


def _fetch(folder: Path) -> None:
    # Lists and cache of its own: it needs no root, and does not matter how old the machine's lists are.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="prometheus-") as scratch:
        work = Path(scratch)
        (work / "lists/partial").mkdir(parents=True)
        (work / "cache/archives/partial").mkdir(parents=True)
        apt = ("apt-get", "-q", "-o", f"Dir::State::Lists={work / 'lists'}", "-o", f"Dir::Cache={work / 'cache'}")
        _run(work, *apt, "update")
        _run(work, *apt, "download", "prometheus")
        _run(work, "dpkg-deb", "-x", *(str(package) for package in work.glob("*.deb")), str(work / "files"))
        kept = work / "kept"
        kept.mkdir()
        for name in _NAMES:
            (work / "files/usr/bin" / name).rename(kept / name)
        kept.rename(folder)


def _run(work: Path, *command: str) -> None:
    log = work / "log"
    try:
        with log.open("ab") as output:
            subprocess.run(command, cwd=work, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LocalFailure(
            f"These tests need Prometheus, and Debian's package could not be had ({error}). "
            f"Put {' and '.join(_NAMES)} on the PATH.",
            log,
        ) from error
