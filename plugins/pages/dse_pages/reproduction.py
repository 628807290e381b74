"""The page of a reproduction: published values beside ours of every study of a paper, misses with causes, figures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dse.results import provenance, report
from dse.results.run_folder import Outputs
from dse_pages import page, pictures
from dse_pages.report import NAME, environment, figure_names, statements
from dse_pages.tables import TextTable, split

_MOST_BYTES = 8_000_000  # of the figures of all studies


@dataclass(frozen=True)
class StudyRow:
    """A study as the page shows it. folder: of its run, None where it has none. state: how it was run, or failed."""

    study: str
    paper: str
    folder: Path | None
    claims: Sequence[Mapping[str, Any]]
    state: str
    seconds: float | None


def write(path: Path, name: str, rows: Sequence[StudyRow]) -> Path:
    """Write the page of some studies; its path."""
    every = distinct([claim for row in rows for claim in row.claims])
    finished = [row for row in rows if row.folder is not None]
    # all studies share the bytes of figures, so that a page of twenty studies still opens
    most = min(pictures.MOST_BYTES, _MOST_BYTES // max(len(finished), 1))
    record = Outputs(finished[-1].folder).read_json("provenance") if finished and finished[-1].folder else {}
    content = {
        "title": f"Reproduction of {name}",
        "name": name,
        "counts": counts(every),
        "overview": _overview(rows),
        "missed": _missed(rows),
        "seconds": duration(sum(row.seconds or 0 for row in rows)),
        "studies": [_study(row, path.parent, most) for row in rows],
        "environment": environment(record) if record else {},
        "versions": record.get("versions", {}),
    }
    return page.write(path, page.render("reproduction.html", content))


def distinct(claims: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each claim once: as the study tests it that misses it, else as one that tests it, else untested."""
    # two studies may test one claim; a miss must not be hidden by a hit
    order = {False: 0, True: 1, None: 2}
    chosen: dict[str, Mapping[str, Any]] = {}
    for claim in claims:
        known = chosen.get(claim["id"])
        if known is None or order[claim["within"]] < order[known["within"]]:
            chosen[claim["id"]] = claim
    return list(chosen.values())


def counts(claims: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Numbers of claims: predicted and tested, within, missed, of another basis, not tested."""
    # None: the claim cannot be tested by the study, with the reason in its row
    tested = [claim for claim in claims if claim["within"] is not None]
    # a finding that was fitted, put in or fixed by construction tests nothing: counted apart
    predicted = [claim for claim in tested if claim["basis"] == "predicted"]
    within = sum(bool(claim["within"]) for claim in predicted)
    return {
        "predicted": len(predicted),
        "within": within,
        "missed": len(predicted) - within,
        "other": len(tested) - len(predicted),
        "untested": len(claims) - len(tested),
    }


def count_line(claims: Sequence[Mapping[str, Any]]) -> str:
    """One line on the claims of a study."""
    return report.claims_count(claims) or ("no claim was tested" if claims else "it checks no published values")


def duration(seconds: float) -> str:
    """A duration as a person says it: `48 s`, `3 min 20 s`, `1 h 5 min`.

    >>> [duration(value) for value in (4.2, 48.3, 200, 3900)]
    ['4.2 s', '48 s', '3 min 20 s', '1 h 5 min']
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def _overview(rows: Sequence[StudyRow]) -> TextTable:
    """A row for each study: how its predictions came out, how long it took, how it was run."""
    columns = ("study", "paper", "predicted", "within", "missed", "other", "not tested", "time", "run")
    numeric = (False, False, True, True, True, True, True, True, False)
    lines = []
    for row in rows:
        count = counts(row.claims)
        duration_text = "–" if row.seconds is None else duration(row.seconds)
        state = row.state.splitlines()[0] if row.state else ""
        lines.append((row.study, row.paper or "–", *map(str, count.values()), duration_text, state))
    return TextTable("Studies", columns, numeric, tuple(lines))


def _missed(rows: Sequence[StudyRow]) -> TextTable:
    """Predictions that are beyond their tolerance, with the cause."""
    lines = [
        (claim["id"], report.error_text(claim), claim["reason"] or "no cause is known")
        for row in rows
        for claim in row.claims
        if claim["within"] is False and claim["basis"] == "predicted"
    ]
    return TextTable("Misses", ("claim", "error", "cause"), (False, True, False), tuple(lines))


def _study(row: StudyRow, base: Path, most: int) -> dict[str, Any]:
    """A study in full; one that failed has its reason alone."""
    if row.folder is None:
        return {"name": row.study, "paper": row.paper, "failed": row.state, "question": ""}
    outputs = Outputs(row.folder)
    summary, record = outputs.read_json("summary"), outputs.read_json("provenance")
    # links of a figure are relative to its run, the page stands elsewhere
    place = Path(os.path.relpath(row.folder, base.resolve()))
    order = figure_names(outputs, report.load_selection(outputs))
    shown = pictures.pictures(outputs.figures, outputs.folder, order=order, most=most)
    return {
        "name": row.study,
        "paper": row.paper,
        "failed": "",
        "question": summary["question"],
        "answer": summary["answer"],
        "claims": split([report.claims_table([dict(claim) for claim in row.claims])]),
        "statements": statements(row.claims),
        "pictures": [_moved(picture, place) for picture in shown],
        "command": provenance.command_line(record),
        # a run made without a page has nothing to link
        "report": quote(str(place / NAME)) if (row.folder / NAME).is_file() else "",
        "time": record.get("time", ""),
    }


def _moved(picture: pictures.Picture, place: Path) -> pictures.Picture:
    """A picture whose links lead from another folder."""
    return pictures.Picture(
        picture.title, picture.source, tuple(f"{quote(str(place))}/{link}" for link in picture.links)
    )
