"""A strict simulator of vLLM engines with bidirectional KV transfer, over real HTTP.

Public API:

- `Cluster(clock=None)`: what the engines share. `await cluster.start(name, **options)` gives a
  listening `SimEngine`; `async with` stops them all. `cluster.hazards` and `cluster.kinds()` tell
  what went wrong in silence (`wrong-kv`, `stale-read`, `never-freed`, ...); an honest router
  leaves them empty.
- `Clock(frozen=False)`: `cluster.clock.advance(seconds)` makes leases and TTLs run out.
- `Options`: the settings of an engine, all of them keywords of `cluster.start`.
- `SimEngine`: `url`, `requests`, `probes`, `retained`, `leased`, `held()`, `settle()`,
  `cold_answer(body, path=...)`; life: `start()`, `stop()`, `restart()`, `partition()`, `heal()`;
  faults: `fail_next()`, `hang_next(point)`, `close_next(point)`, `error_next()`, `pause_stream`.
- `Recorded`: one request as it came: `path`, `headers`, `raw`, `json`, `kv`, `status`, `aborted`,
  `is_prefill`, `is_decode`, `is_release`.
- `encode`, `decode`, `EOS`: the tokenizer.

The model is directed by words in the last user message: `[think]` (reasons first), `[tool]`
(calls a tool, if it has one; takes some 60 tokens), `[halves]` (spells words in tokens that a tokenizer would not
choose, so that the answer does not come back as it was generated), `[long]` (never ends by
itself), `[short]` (two words). Everything else it says follows from the KV it holds.

    async with Cluster() as cluster:
        prefill = await cluster.start("p", kv_recompute_threshold=16)
        decode = await cluster.start("d", num_blocks=64)
        body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
        ...                                # send it through the proxy under test
        assert answer["choices"][0]["message"] == right["choices"][0]["message"]
        # where right = await decode.cold_answer(body)
        assert not cluster.hazards and not prefill.held()
        cluster.clock.advance(480)
        assert not decode.held()
"""

from .clock import Clock
from .cluster import Cluster, Hazard
from .engine import SimEngine
from .faults import Fault, Point
from .options import Options
from .recording import Recorded
from .retention import Held, Retention
from .tokenizer import EOS, decode, encode

__all__ = [
    "EOS",
    "Clock",
    "Cluster",
    "Fault",
    "Hazard",
    "Held",
    "Options",
    "Point",
    "Recorded",
    "Retention",
    "SimEngine",
    "decode",
    "encode",
]
