"""The entry point, against a package on disk that is laid out like vLLM."""

import importlib
import inspect
import logging
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.turnback_engine.patch import TARGETS
from engine.turnback_engine.plugin import register

CHAT, TEXT = TARGETS

FAKE = """
from tests.unit.engine_fakes import {chunk} as {model}, {new_class}
{owner} = {new_class}()
"""


class Site:
    """A directory on the import path with as much of vLLM in it as a test wants."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, module: str, source: str) -> None:
        *packages, name = module.split(".")
        folder = self._path
        for package in packages:
            folder = folder / package
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{name}.py").write_text(source)
        importlib.invalidate_caches()

    def add_vllm(self, chunk: str = "Chunk") -> None:
        for target, new_class in ((CHAT, "new_chat_class"), (TEXT, "new_text_class")):
            self.add(
                target.module,
                FAKE.format(chunk=chunk, model=target.chunk, owner=target.owner, new_class=new_class),
            )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    # Where the real vLLM is installed, its own must not be found.
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "vllm"}
    yield Site(tmp_path)
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(real)


def is_patched(name: str) -> bool:
    target = next(target for target in TARGETS if target.module == name)
    method = getattr(getattr(importlib.import_module(name), target.owner), target.method)
    return not inspect.isasyncgenfunction(method)


def test_registering_imports_nothing_and_importing_patches(site: Site) -> None:
    site.add_vllm()
    register()
    assert not {CHAT.module, TEXT.module} & set(sys.modules)
    assert is_patched(CHAT.module)
    assert is_patched(TEXT.module)


def test_a_module_that_is_imported_already_is_patched_at_once(site: Site) -> None:
    site.add_vllm()
    importlib.import_module(CHAT.module)
    register()
    assert is_patched(CHAT.module)


def test_registering_again_and_again(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.add_vllm()
    finders = len(sys.meta_path)
    register()
    register()
    assert is_patched(CHAT.module)
    assert is_patched(TEXT.module)
    register()
    assert len(sys.meta_path) == finders
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_module_keeps_its_own_loader(site: Site) -> None:
    site.add_vllm()
    register()
    module = importlib.import_module(CHAT.module)
    assert module.__spec__ is not None
    assert module.__loader__ is module.__spec__.loader
    assert "new_chat_class" in inspect.getsource(module)


def test_a_vllm_that_does_it_itself_is_left_alone(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.add_vllm(chunk="NativeChunk")
    caplog.set_level(logging.INFO)
    register()
    assert not is_patched(CHAT.module)
    assert not is_patched(TEXT.module)
    assert all("by itself" in record.message for record in caplog.records)


def test_one_api_may_be_strange_and_the_other_not(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.add_vllm()
    site.add(CHAT.module, "class OpenAIServingChat: pass\nclass ChatCompletionStreamResponse: pass\n")
    register()
    importlib.import_module(CHAT.module)
    assert is_patched(TEXT.module)
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "ChatCompletionStreamResponse is not a pydantic model" in warning
    assert "requests that do not stream only" in warning
    assert "Install vLLM 0.33" in warning


@pytest.mark.parametrize("module", ["vllm", "vllm.entrypoints.openai.chat_completion.protocol"])
def test_a_vllm_without_the_modules_gets_a_warning_for_each(
    site: Site, caplog: pytest.LogCaptureFixture, module: str
) -> None:
    site.add(module, "")
    register()
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [target.module in warning for target, warning in zip(TARGETS, warnings, strict=True)] == [True] * 2


def test_only_the_first_process_says_that_modules_are_missing(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("vllm.version", "")
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    register()
    assert not caplog.records


def test_an_import_that_fails_fails_as_before_and_may_be_tried_again(site: Site) -> None:
    site.add_vllm()
    folder = Path(next(iter(sys.path)))
    good = (folder / Path(*CHAT.module.split("."))).with_suffix(".py").read_text()
    site.add(CHAT.module, "raise RuntimeError('no driver')\n")
    register()
    with pytest.raises(RuntimeError, match="no driver"):
        importlib.import_module(CHAT.module)
    site.add(CHAT.module, good + "\n# changed\n")
    assert is_patched(CHAT.module)
