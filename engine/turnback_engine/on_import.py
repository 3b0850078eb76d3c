"""Act on a module when it is imported, without importing it.

Plugins are loaded in every process of vLLM. Only the API server imports the modules that write
streams; engine and worker processes must not pay for them.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import dropwhile
from types import ModuleType

Action = Callable[[ModuleType], None]


def after_import(name: str, action: Action) -> None:
    """Call ``action`` with module ``name``: now if it is imported, else right after its import."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(MetaPathFinder):
    """Finds one module, with the help of the finders behind it, and sees it loaded."""

    def __init__(self, name: str, action: Action) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        # Only those behind this one: two of these must not ask each other for ever.
        behind = dropwhile(lambda finder: finder is not self, list(sys.meta_path))
        next(behind, None)
        for finder in behind:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def loaded(self, module: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._action(module)


class _Loader(Loader):
    """Loads as ``loader`` does, then tells ``finder``."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Whoever asks the module for its source later must meet its own loader, not this one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.loaded(module)
