"""Build everything the local pair needs, once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from deploy.local.engine_env import REQUIREMENTS, ensure_engine_env
from deploy.local.failure import LocalFailure
from deploy.local.layout import PROJECT, Layout
from deploy.local.progress import Progress
from deploy.local.stamp import Stamp, digest, exclusive

HERE = Path(__file__).resolve().parent
MODEL_SOURCES = (HERE / "model.py", HERE / "chat_template.jinja", REQUIREMENTS)


def ensure(layout: Layout | None = None, progress: Progress | None = None) -> Layout:
    """Have the engines' environment and the model; return where they are.

    Quick when they are there already. Another process that builds the same is waited for.
    Raises `LocalFailure`.
    """
    layout = layout or Layout.default()
    progress = progress or Progress()
    if sys.platform != "linux":
        raise LocalFailure("The local pair runs on Linux only: vLLM's CPU build and NIXL need it.")
    with exclusive(layout.lock):
        ensure_engine_env(layout, progress)
        _ensure_model(layout, progress)
    return layout


def _ensure_model(layout: Layout, progress: Progress) -> None:
    wanted = digest(MODEL_SOURCES, sys.version)
    # Beside the directory, not in it: vLLM is handed the directory as it is.
    stamp = Stamp(layout.directory / "model.stamp")
    if stamp.holds(wanted):
        return
    log = layout.logs / "model.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with stamp.replaced_by(wanted), progress.step("Making the model"), log.open("wb") as output:
        shutil.rmtree(layout.model, ignore_errors=True)
        layout.model.mkdir(parents=True)
        made = subprocess.run(
            [str(layout.engine_python), "-m", "deploy.local.model", str(layout.model)],
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if made.returncode != 0:
            raise LocalFailure("The model could not be made.", log)
