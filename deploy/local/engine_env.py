"""Build the engines' environment: vLLM for the CPU, NIXL, and our plugins, apart from the router's.

vLLM pins the web framework and much else, so engines and router cannot share one.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.local.failure import LocalFailure
from deploy.local.layout import PROJECT, Layout
from deploy.local.progress import Progress
from deploy.local.stamp import Stamp, digest, source_files

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "engine-requirements.txt"
# Installed from source beside vLLM, in this order.
PROJECTS: Mapping[str, Path] = {
    "vllm-metadata": HERE / "vllm_metadata",
    "quiet-nixl": HERE / "quiet_nixl",
    "turnback-engine": PROJECT / "engine",
}
CPU_TORCH_HINT = (
    "If this torch was built for CUDA: set TURNBACK_PIP_ARGS='--extra-index-url <PyTorch's CPU index>' "
    "and run it again."
)


def ensure_engine_env(layout: Layout, progress: Progress, requirements: Path = REQUIREMENTS) -> None:
    """Have `layout.engine` hold what the requirements and our plugins say.

    Does nothing when it does already. Changed requirements, another Python or an interrupted
    build start from an empty environment; a changed plugin is only installed again. The caller
    holds `layout.lock`. Raises `LocalFailure` with the end of pip's output.
    """
    base = digest([requirements], sys.version)
    stamp = Stamp(layout.engine / "stamps" / "base")
    if not stamp.holds(base):
        with stamp.replaced_by(base):
            _build_base(layout, progress, requirements)
    for name, project in PROJECTS.items():
        # The plugin inside engine/ may not be there yet in a partial checkout.
        if not (project / "pyproject.toml").exists():
            continue
        files = source_files(project)
        wanted = digest(files, *(str(path.relative_to(project)) for path in files))
        stamp = Stamp(layout.engine / "stamps" / name)
        if not stamp.holds(wanted):
            with stamp.replaced_by(wanted), progress.step(f"Installing {name}"):
                _install_project(layout, project, files)


def _build_base(layout: Layout, progress: Progress, requirements: Path) -> None:
    shutil.rmtree(layout.engine, ignore_errors=True)
    log = _log(layout)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("", encoding="utf-8")
    progress.note(f"Building the engines' environment: about 4 GB, a few minutes. pip's output: {log}")
    with progress.step("Creating a virtual environment"):
        venv.create(layout.engine, with_pip=True, symlinks=True)
    with progress.step("Installing torch"):
        _pip(layout, "install", "--no-deps", torch_requirement(requirements))
    count = len(_requirement_lines(requirements)) - 1
    with progress.step(f"Installing vLLM, NIXL and what they need ({count} packages)"):
        _pip(layout, "install", "--no-deps", "-r", str(requirements))
    with progress.step("Trying torch and NIXL"):
        check = [str(layout.engine_python), "-c", "import torch, nixl._api; torch.zeros(1)"]
        _run(check, log, f"torch or NIXL cannot be imported. {CPU_TORCH_HINT}")


def _install_project(layout: Layout, project: Path, files: Sequence[Path]) -> None:
    # From a copy: building leaves files in the source tree, which may be read by others just now.
    with tempfile.TemporaryDirectory(dir=layout.directory, prefix="build-") as scratch:
        for path in files:
            copy = Path(scratch) / path.relative_to(project)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        _pip(layout, "install", "--no-deps", "--no-build-isolation", "--force-reinstall", scratch)


def torch_requirement(requirements: Path) -> str:
    """The one line that pins torch: it goes first, so that an index for it can be tried early."""
    return next(line for line in _requirement_lines(requirements) if line.startswith("torch=="))


def _requirement_lines(requirements: Path) -> list[str]:
    lines = requirements.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pip_command(python: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """pip, run by `python`, with what `TURNBACK_PIP_ARGS` adds."""
    extra = shlex.split(environ.get("TURNBACK_PIP_ARGS", ""))
    return [str(python), "-m", "pip", "--disable-pip-version-check", *arguments, *extra]


def _pip(layout: Layout, *arguments: str) -> None:
    command = pip_command(layout.engine_python, arguments, os.environ)
    _run(command, _log(layout), f"`pip {' '.join(arguments)}` failed")


def _run(command: Sequence[str], log: Path, failure: str) -> None:
    with log.open("ab") as output:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False)
    if result.returncode != 0:
        raise LocalFailure(failure, log)


def _log(layout: Layout) -> Path:
    return layout.logs / "engine-env.log"
