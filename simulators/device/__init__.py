"""Compiled parts that simulators of a device share, each once: a simulator is a loop of events that calls them.

records       state by named fields: layouts, and arrays of them
lru           sets of a cache: which way holds a tag, and which was used longest ago
rings         first-in-first-out queues in rings of fixed size
events        what acts next: the earliest of a few lanes, and a binary heap of many
servers       what serves one request after another at a fixed pace: a port, a bus, a link (a bucket of one token)
dram          times of a bank: activation, column, and refreshes that have passed
histograms    counts in bins of time that become twice as wide when a run outgrows them

A kernel names a part by its module (`lru.find_way`) and is compiled by `simulators.compiled.flat_over(*PARTS)`. Parts
take arrays, a first place in them and numbers, so that simulators keep their own layout: flat arrays with offsets
(`dse_memory.engine`) or records (`dse_near_memory.engine`, `dse_ptx.sm_kernel`).

What is not shared, and why. A channel of `dse_memory.engine` answers a request at once with its time: its window
remembers the last activations of a bank, and a buffer drains writes in batches. A channel of `dse_near_memory.engine`
keeps requests in a queue and chooses among them when its bus is free, as T3's arbiter has to see what waits; its
columns obey bank groups. A common channel would be both at once. They share the times of a bank alone. Neither has a
heap for its few lanes: SMs, channels and CUs are scanned.
"""

from __future__ import annotations

from simulators.device import dram, events, histograms, lru, rings, servers

PARTS = (dram, events, histograms, lru, rings, servers)
"""Modules of compiled parts, for `simulators.compiled.flat_over`."""
