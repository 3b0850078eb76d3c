"""`python -m deploy.grafana` writes the dashboard anew, after a change of what it shows."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.grafana.turnback import turnback

FILE = Path(__file__).with_name("turnback.json")


def text() -> str:
    """What the file holds."""
    return json.dumps(turnback(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
