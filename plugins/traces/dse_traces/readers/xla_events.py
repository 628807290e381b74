"""Events of XLA (JAX, TensorFlow) in a Chrome trace: what ran on the streams of a process `/device:GPU:0`.

They have no category. Other lines of such a process (`XLA Ops`, `Steps`) repeat what ran on its streams.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dse_traces.profile.kernels import MOST_GPUS

_GPU = re.compile(r"/device:GPU:\d+")
_STREAM = "Stream #"
_MOST_STREAMS = 4096


@dataclass(frozen=True)
class XlaStreams:
    """GPUs by pid, and their streams (pid, tid), as far as a trace has named them."""

    gpus: dict[Any, str] = field(default_factory=dict)
    streams: set[tuple[Any, Any]] = field(default_factory=set)

    def gpu_of(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> str | None:
        """Read an event that names a GPU or a stream; return the GPU of one that ran on a stream, None of others."""
        if not isinstance(event.get("pid"), str | int):
            return None
        pid, stream, text = event["pid"], (event["pid"], event.get("tid")), str(args.get("name", ""))
        if event.get("name") == "process_name" and _GPU.fullmatch(text) and len(self.gpus) < MOST_GPUS:
            self.gpus[pid] = text
        elif event.get("name") == "thread_name" and text.startswith(_STREAM):
            if pid in self.gpus and len(self.streams) < _MOST_STREAMS:
                self.streams.add(stream)
        # "X" is a complete event, with a begin and a duration
        elif stream in self.streams and event.get("ph") == "X":
            return self.gpus[pid]
        return None
