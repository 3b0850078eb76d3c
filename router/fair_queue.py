"""Who is next: what waits, in turns by caller, so that the many of one do not keep out the few of another."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_Item = TypeVar("_Item", bound=Hashable)


class FairQueue(Generic[_Item]):
    """At most ``size`` items. Callers take turns; the items of one caller keep their order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting = 0
        # By caller, the one whose turn it is first. No caller is here without an item.
        self._lines: OrderedDict[str, OrderedDict[_Item, None]] = OrderedDict()

    def __len__(self) -> int:
        return self._waiting

    def add(self, caller: str, item: _Item) -> _Item | None:
        """Let ``item`` wait; what there is no room for: None, or ``item`` itself, or another that was taken out.

        In a full queue the newest item of the caller with the most gives way, if ``caller`` has fewer even
        with this one: whoever fills the queue fills it for itself only.
        """
        line = self._lines.get(caller)
        displaced = None
        if self._waiting >= self._size:
            longest = max(self._lines, key=lambda name: len(self._lines[name]), default=caller)
            if len(self._lines.get(longest, ())) < len(line or ()) + 2:
                return item
            displaced = next(reversed(self._lines[longest]))
            self.discard(longest, displaced)
        self._lines.setdefault(caller, OrderedDict())[item] = None
        self._waiting += 1
        return displaced

    def next(self) -> _Item | None:
        """Take out the item whose turn it is; None if nothing waits."""
        if not self._lines:
            return None
        caller, line = self._lines.popitem(last=False)
        item, _ = line.popitem(last=False)
        if line:
            self._lines[caller] = line
        self._waiting -= 1
        return item

    def discard(self, caller: str, item: _Item) -> None:
        """Take out ``item`` of ``caller``, if it is still there."""
        line = self._lines.get(caller)
        if line is None or item not in line:
            return
        del line[item]
        if not line:
            del self._lines[caller]
        self._waiting -= 1
