"""Published claims of all studies, judged again: how many predictions are within, and every miss with its cause.

`python -m benchmarks.claims [<study> ...]` runs each study that has claims, without a store, and prints a table;
`--flips` judges each again for every uncertain constant that is moved (`dse robustness claims=true`). `--record` keeps
the rows of the studies it ran in `benchmarks/records/claims/`, and writes docs/explanation/claims.md and the table of
the README from all that are kept there; `--write` writes both and runs nothing.
Only predicted claims test a model: those that a constant was fitted to, that are put in, or that cannot come out
otherwise are counted apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.recorded import ROOT
from benchmarks.unchanged import run
from dse.results.report import error_text, flips_text

RECORD = ROOT / "docs" / "explanation" / "claims.md"
ROWS = ROOT / "benchmarks" / "records" / "claims"
README = ROOT / "README.md"
BEGIN, END = "<!-- trust: python -m benchmarks.claims --write -->", "<!-- end of trust -->"
"""Lines of the README between which the table by paper stands."""
STUDIES = {
    "ficco_sweep": "FiCCO",
    "conccl": "ConCCL",
    "t3": "T3",
    "fused_ops": "fused computation-collective operators",
    "goldyloc": "GOLDYLOC",
    "jitq": "JIT-Q",
    "comp_vs_comm": "Tale of Two Cs",
    "bert": "Demystifying BERT",
    "seqpoint": "SeqPoint",
    "gpgpusim": "GPGPU-Sim with cuDNN",
    "cache_policies": "GPU cache policies",
    "operators": "published values of hardware",
    "overlap_measured": "measured overlaps",
}
"""Study -> what its claims are of."""
_MOST_NAMED = 3
_BASES = ("fitted", "input", "by construction")

_HEAD = """# Claims

Published values beside ours, judged by their tolerances; written by `python -m benchmarks.claims --record`. Only
predicted claims test a model. Fitted: a constant was fitted to them. Input: the published value, or a constant taken
from it, is put in. By construction: the model cannot say otherwise. Errors carry their sign: ours over the published
value, less one. Flips: each constant that was assumed, derived or recalled is moved alone, by what its source says or
by 20 % either way, and the claims are judged again (`python -m dse robustness study=<name> claims=true`): a verdict
that then turns rests on that constant, and one that does not stands. An empty cell: not asked.
"""

Rows = Sequence[Mapping[str, Any]]


def judged(study: str, *, flips: bool) -> Rows:
    """Claims of a study, run anew; with what turns their verdicts. Raises RuntimeError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        failure = run(ROOT, study, Path(folder), "figures=none")
        failure = failure or (examine(study, Path(folder)) if flips else "")
        if failure:
            raise RuntimeError(f"study={study}: {failure}")
        rows: Rows = json.loads((Path(folder) / study / "latest" / "claims.json").read_text("utf-8"))
        return rows


def examine(study: str, folder: Path) -> str:
    """Judge the claims of a finished run under uncertain constants; why it failed, or ""."""
    command = [sys.executable, "-m", "dse", "robustness", f"study={study}", "claims=true", f"output_dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr.strip()[-500:] if done.returncode else ""


def keep(study: str, rows: Rows) -> None:
    """Write the rows of a study beside the other records."""
    ROWS.mkdir(parents=True, exist_ok=True)
    (ROWS / f"{study}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def records() -> dict[str, Rows]:
    """Rows of all studies that are kept."""
    paths = {study: ROWS / f"{study}.json" for study in STUDIES}
    return {study: json.loads(path.read_text("utf-8")) for study, path in paths.items() if path.exists()}


def count(rows: Rows) -> dict[str, int]:
    """Numbers of claims: predicted ones within and missed, those on another basis, those that were not tested."""
    tested = [row for row in rows if row["within"] is not None]
    bases = Counter(row["basis"] for row in tested)
    within = sum(row["within"] for row in tested if row["basis"] == "predicted")
    counts = {"within": within, "missed": bases["predicted"] - within, **{basis: bases[basis] for basis in _BASES}}
    flipping = sum(bool(row["flips"]) for row in tested if row["basis"] == "predicted")
    return {**counts, "not tested": len(rows) - len(tested), "flipping": flipping}


def table(claims: Mapping[str, Rows]) -> Iterator[str]:
    """Lines of Markdown: a row for each study and their sum."""
    counts = {study: count(rows) for study, rows in claims.items()}
    columns = ["predicted, within", "predicted, missed", *_BASES, "not tested", "predicted that flip"]
    yield f"| claims of | study | {' | '.join(columns)} |"
    yield f"|---|---|{'--:|' * len(columns)}"
    for study, numbers in counts.items():
        asked = any(row["flips"] is not None for row in claims[study])
        cells = [str(number) for name, number in numbers.items() if name != "flipping"]
        cells += [str(numbers["flipping"]) if asked else "not asked"]
        yield f"| {STUDIES.get(study, study)} | `{study}` | {' | '.join(cells)} |"
    total = [sum(numbers[name] for numbers in counts.values()) for name in next(iter(counts.values()))]
    yield f"| all | | {' | '.join(map(str, total))} |"


def trust(claims: Mapping[str, Rows]) -> Iterator[str]:
    """Lines of Markdown: a row for each paper with its predictions that are within, of how many, and the misses."""
    yield "| published by | study | within tolerance | missed, with the error |"
    yield "|---|---|--:|---|"
    predicted = {study: _predicted(rows) for study, rows in claims.items()}
    for study, rows in predicted.items():
        missed = [row for row in rows if not row["within"]]
        names = [f"{row['id'].partition('.')[2]} {error_text(row)}".strip() for row in missed[:_MOST_NAMED]]
        names += [f"{len(missed) - _MOST_NAMED} more"] if len(missed) > _MOST_NAMED else []
        within = f"{len(rows) - len(missed)} of {len(rows)}"
        yield f"| {STUDIES.get(study, study)} | `{study}` | {within} | {', '.join(names) or '–'} |"
    total = [row["within"] for rows in predicted.values() for row in rows]
    yield f"| all | | {sum(total)} of {len(total)} | |"


def _predicted(rows: Rows) -> Rows:
    """Claims that test the model: predicted, and tested."""
    return [row for row in rows if row["within"] is not None and row["basis"] == "predicted"]


def with_trust(page: str, claims: Mapping[str, Rows]) -> str:
    """A page with the table by paper between `BEGIN` and `END`. Raises ValueError where it has no such lines."""
    before, begin, after = page.partition(BEGIN)
    _, end, behind = after.partition(END)
    if not begin or not end:
        raise ValueError(f"no lines {BEGIN} and {END}")
    return "\n".join([f"{before}{begin}", "", *trust(claims), "", f"{end}{behind}"])


def write() -> None:
    """Write the page of claims and the README's table from the rows that are kept."""
    claims = records()
    RECORD.write_text(report(claims), encoding="utf-8")
    README.write_text(with_trust(README.read_text("utf-8"), claims), encoding="utf-8")


def misses(claims: Mapping[str, Rows]) -> Iterator[str]:
    """Lines of Markdown: each claim that is missed, with what was published, what is ours, and the cause."""
    yield "| claim | published | ours | error | basis | verdict | why |"
    yield "|---|--:|--:|--:|---|---|---|"
    for row in (row for rows in claims.values() for row in rows if row["within"] is False):
        why = row["reason"].replace("|", "/")
        yield f"| {_cells(row)} | {row['basis']} | {flips_text(row)} | {why} |"


def flipping(claims: Mapping[str, Rows]) -> Iterator[str]:
    """Lines of Markdown: each claim that is within and would not be with another value of an uncertain constant."""
    yield "| claim | published | ours | error | basis | verdict |"
    yield "|---|--:|--:|--:|---|---|"
    for row in (row for rows in claims.values() for row in rows if row["within"] and row["flips"]):
        yield f"| {_cells(row)} | {row['basis']} | {flips_text(row)} |"


def _cells(row: Mapping[str, Any]) -> str:
    """Claim, published value, ours and its error."""
    unit = "" if row["unit"] == "bool" else f" {row['unit']}"
    published = "unverified" if row["provenance"] == "memory" else f"{_text(row['published'])}{unit}"
    return f"`{row['id']}` | {published} | {_text(row['ours'])}{unit} | {error_text(row)}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " to ".join(f"{number:.3g}" for number in value) if isinstance(value, list) else f"{value:.3g}"


def report(claims: Mapping[str, Rows]) -> str:
    """The page."""
    parts = [_HEAD, *table(claims), "", "## Missed", "", *misses(claims), "", "## Within, and flips", ""]
    return "\n".join([*parts, *flipping(claims), ""])


def main() -> int:
    """Judge and print, or record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", help="studies to judge; all that have claims by default")
    parser.add_argument("--flips", action="store_true", help="judge again under uncertain constants: minutes a study")
    parser.add_argument("--record", action="store_true", help="keep the rows, and write the pages")
    parser.add_argument("--write", action="store_true", help="write the pages from the rows that are kept")
    words = parser.parse_args()
    if words.write:
        write()
        return 0
    claims = dict[str, Rows]()
    for study in words.studies or STUDIES:
        claims[study] = judged(study, flips=words.flips)
        if words.record:
            keep(study, claims[study])
        print(f"{study}: {count(claims[study])}", file=sys.stderr, flush=True)
    print(report(claims))
    if words.record:
        write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
