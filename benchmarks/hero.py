"""The first picture of the README: one GEMM and its all-gather before and after overlap, exposed communication in red.

`python -m benchmarks.hero` runs the scenario `g2` of `study=ficco_sweep` twice, serial as the baseline and searched,
and draws both timelines into `docs/images/overlap.png`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

import dse

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "overlap.png"
SCENARIO = "g2"
BASELINE = {"schedule": "serial", "schedule__comm_engine": "cu"}
Span = tuple[float, float]
_COLOURS = {"hidden": "#8fb8de", "exposed": "#d62728", "compute": "#5a5a5a"}


def timeline(**overrides: Any) -> pd.DataFrame:
    """Tasks of the scenario's winner."""
    quiet: dict[str, Any] = {"figures": "none", "tracking": "none", "store": "none", "fidelity": "none"}
    with tempfile.TemporaryDirectory() as folder:
        dse.run("ficco_sweep", workload__only=[SCENARIO], output_dir=folder, **quiet, **overrides)
        return pd.read_parquet(Path(folder) / "ficco_sweep" / "latest" / "timelines.parquet")


def union(spans: list[Span]) -> list[Span]:
    """Spans merged where they overlap or touch.

    >>> union([(0.0, 2.0), (1.0, 3.0), (4.0, 5.0)])
    [(0.0, 3.0), (4.0, 5.0)]
    """
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def without(spans: list[Span], covers: list[Span]) -> list[Span]:
    """Parts of disjoint spans that no cover lies over; covers are disjoint and in order.

    >>> without([(0.0, 5.0)], [(1.0, 2.0), (4.0, 6.0)])
    [(0.0, 1.0), (2.0, 4.0)]
    """
    parts = []
    for start, end in spans:
        inside = [(first, last) for first, last in covers if first < end and last > start]
        begins = [start, *(last for _, last in inside)]
        ends = [*(first for first, _ in inside), end]
        parts += list(zip(begins, ends, strict=True))
    return [(begin, end) for begin, end in parts if end > begin]


def communication(tasks: pd.DataFrame) -> tuple[list[Span], list[Span]]:
    """Spans of all communication and of its exposed part [ms]."""
    ends = {kind: (1e3 * rows[["start_s", "finish_s"]]).to_numpy().tolist() for kind, rows in tasks.groupby("kind")}
    computing, moving = (union([tuple(span) for span in ends[kind]]) for kind in ("gemm", "transfer"))
    return moving, without(moving, computing)


def times(tasks: pd.DataFrame) -> dict[str, float]:
    """Numbers that the picture gives for a timeline [ms]."""
    exposed = sum(end - start for start, end in communication(tasks)[1])
    return {"total_ms": round(1e3 * float(tasks["finish_s"].max()), 1), "exposed_ms": round(exposed, 1)}


def draw_panel(panel: Axes, tasks: pd.DataFrame, title: str) -> None:
    """Draw computation over communication, its exposed part in red [ms]."""
    moving, exposed = communication(tasks)
    pieces = (1e3 * tasks.loc[tasks["kind"] == "gemm", ["start_s", "finish_s"]]).to_numpy().tolist()
    for height, spans, look in ((1, pieces, "compute"), (0, moving, "hidden"), (0, exposed, "exposed")):
        widths = [(start, end - start) for start, end in spans]
        panel.broken_barh(widths, (height - 0.36, 0.72), facecolor=_COLOURS[look], edgecolor="white", linewidth=0.6)
    shown = times(tasks)
    title = f"{title}: {shown['total_ms']} ms, {shown['exposed_ms']} ms of them waiting for communication"
    panel.set_title(title, loc="left", fontsize=10)
    panel.set(yticks=[0, 1], yticklabels=["communication", "computation"])
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)


def main() -> int:
    """Run both and draw them; the file says in its metadata what it shows."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    before, after = timeline(**BASELINE), timeline()
    figure, panels = plt.subplots(2, 1, figsize=(8, 3.4), sharex=True, layout="constrained")
    draw_panel(panels[0], before, "before, one after the other")
    draw_panel(panels[1], after, "after, in pieces at the same time")
    panels[1].set_xlabel("time [ms]")
    labels = {"exposed": "exposed communication", "hidden": "hidden communication", "compute": "computation"}
    handles = [Patch(color=_COLOURS[look], label=label) for look, label in labels.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(PICTURE, dpi=140, metadata={"Description": json.dumps([times(before), times(after)])})
    print(f"{before['finish_s'].max() / after['finish_s'].max():.2f}x faster, drawn into {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
