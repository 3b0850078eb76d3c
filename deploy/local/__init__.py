"""A real pair of vLLM engines (one prefill, one decode) on the CPU of one machine.

`python -m deploy.local serve` starts the pair and the router in front of it.
Tests and benches use `deploy.local.pair` directly.
"""
