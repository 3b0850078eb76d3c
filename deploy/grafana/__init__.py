"""The dashboard: a module for each row, `promql.py` and `look.py` for what they share, `board.py` for Grafana."""
