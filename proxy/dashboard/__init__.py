"""What the page at ``/dashboard`` shows, and the page itself (``page/``: plain HTML, CSS and JavaScript)."""

from proxy.dashboard.figures import Figures, figures_of
from proxy.dashboard.newest import Newest, ToldTurn, told_turn

__all__ = ["Figures", "Newest", "ToldTurn", "figures_of", "told_turn"]
