"""What to set, from what was measured: `turnback advise`."""
