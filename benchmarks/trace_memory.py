"""Peak memory of importing a trace of a million kernels."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_SCRIPT = """
import re, sys
from pathlib import Path
from dse.errors.terminal import quiet
from dse_traces.readers.formats import read
with quiet():
    profile = read(Path(sys.argv[1]))
peak = re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())  # ru_maxrss counts the parent's, too
print(1024 * int(peak.group(1)) / 1e9 / (len(profile) / 1e6))
"""


def import_peak_gb_per_million(events: Iterable[Any]) -> float:
    """Peak resident memory [GB] of a process that imports a Chrome trace, for each million of its kernels.

    events: of the trace. The interpreter and its libraries count. Linux only. Raises subprocess.CalledProcessError.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.json"
        with path.open("w", encoding="utf-8") as file:
            file.write('{"schemaVersion": 1, "traceEvents": [{}')
            for event in events:
                file.write(",\n" + json.dumps(event))
            file.write("]}")
        command = [sys.executable, "-c", _SCRIPT, str(path)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
