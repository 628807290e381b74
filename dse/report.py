"""What a person sees after a study: the table of winners, the claims, figures, and where everything is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse import discovery
from dse.claims import judge
from dse.outputs import Outputs
from dse.study import winners

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table


def draw(outputs: Outputs, module: str) -> list[Path]:
    """Draw the study's figures from what is stored; their paths."""
    from dse import plots

    study = discovery.load("studies", module, "STUDY")
    found = study.figures(outputs.read_table("results"), outputs.read_table("timelines"))
    return [path for name, figure in found for path in plots.save(figure, outputs.figures, name)]


def check(outputs: Outputs, module: str) -> list[dict[str, Any]]:
    """Judge the paper's claims on the stored table and write `claims.json`; its rows."""
    study = discovery.load("studies", module, "STUDY")
    stored = outputs.read_json("summary")
    changed = [text for text in stored["departures"] if not text.lstrip("+").startswith(study.allows)]
    departure = f"the claims are about another configuration: {', '.join(changed)}" if changed else ""
    findings = {} if departure else study.findings(outputs.read_table("results"))
    rows = judge(study.claims(), findings, departure=departure)
    outputs.write_json("claims", rows)
    return rows


def summary(outputs: Outputs) -> Table:
    """One row per scenario: the winning schedule, its speed-up, fraction of ideal, and what limits it."""
    from rich.table import Table

    stored = outputs.read_json("summary")
    best = winners(outputs.read_table("results"), stored["goals"])
    others = [path for path in stored["knobs"] if path not in stored["shown"]]
    knobs = [path for path in (*stored["shown"], *others) if path in best]
    shown = Table(title=f"{stored['study']}: best {next(iter(stored['goals']))} per scenario")
    for name in (
        "scenario",
        *(path.rpartition(".")[2] if path != "schedule.name" else "schedule" for path in knobs),
    ):
        shown.add_column(name)
    for name in ("makespan", "speed-up", "% of ideal"):
        shown.add_column(name, justify="right")
    shown.add_column("limited by")
    for _, row in best.iterrows():
        limits = stored["limits"].get(row["scenario"], {})
        values = [_cell(row[path]) for path in knobs]
        shown.add_row(row["scenario"], *values, *_gains(row), _limit(limits))
    return shown


def said(row: pd.Series[Any], section: str = "schedule") -> str:
    """The knobs of one section of a row, for a title: `hetero_fused_1d, mover dma, granularity 8`."""
    values = {str(path): value for path, value in row.dropna().items()}
    known = {path.partition(".")[2]: value for path, value in values.items() if path.startswith(f"{section}.")}
    return ", ".join(str(value) if name == "name" else f"{name} {value}" for name, value in known.items())


def _cell(value: Any) -> str:
    import pandas as pd

    return "–" if value is None or pd.isna(value) else f"{value:g}" if isinstance(value, float) else str(value)


def _gains(row: pd.Series[Any]) -> tuple[str, str, str]:
    ms = f"{row['makespan_s'] * 1e3:.3f} ms"
    return ms, f"{row['speedup']:.2f}x", f"{100 * row['fraction_of_ideal']:.0f} %"


def _limit(limits: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in list(limits.items())[:2])


def claims_table(rows: list[dict[str, Any]]) -> Table | str:
    """Theirs beside ours, a miss said to be a miss with its cause; one line where none can be tested."""
    from rich.table import Table

    if len({row["reason"] for row in rows}) == 1:
        return f"published claims were not tested: {rows[0]['reason']}"

    shown = Table(title="Published claims, and ours (predicted)")
    for name, justify in (
        ("claim", "left"),
        ("published", "right"),
        ("ours", "right"),
        ("verdict", "left"),
        ("why", "left"),
    ):
        shown.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        verdict = {True: "within", False: "MISS", None: "not tested"}[row["within"]]
        published = _value(row["published"], row["unit"]) if row["provenance"] != "memory" else "unverified"
        shown.add_row(row["id"], published, _value(row["ours"], row["unit"]), verdict, row["reason"])
    return shown


def _value(value: Any, unit: str) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g} {unit}" if unit not in ("bool",) else f"{value:.4g}"
