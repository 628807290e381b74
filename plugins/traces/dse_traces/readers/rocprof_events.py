"""Events of rocprof in a Chrome trace: what ran on a queue, with times [ns] among `args`, and numbers as texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NS = 1e-9


def is_rocprof_event(args: Mapping[str, Any]) -> bool:
    """True for the arguments of an event of rocprof."""
    return "BeginNs" in args


def rocprof_row(event: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row of a kernel; None for a call of the host. Raises KeyError, TypeError or ValueError for fields that cannot
    be read.
    """
    queue = [str(args[name]) for name in ("stream-id", "queue-id") if args.get(name) not in (None, "")]
    if not queue:
        return None
    start, end = int(args["BeginNs"]), int(args["EndNs"])
    name = str(args.get("Name") or args.get("KernelName") or event["name"]).removesuffix(" [clone .kd]")
    times = {"start_s": start * _NS, "seconds": (end - start) * _NS}
    return {"name": name.removesuffix(".kd"), "stream": " ".join(queue), **times}
