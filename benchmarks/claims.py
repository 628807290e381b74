"""Published claims of all studies, judged again: how many predictions are within, and every miss with its cause.

`python -m benchmarks.claims [<study> ...]` runs each study that has claims, without a store, and prints a table;
`--flips` judges each again for every uncertain constant (`dse results robustness claims=true`). `--record` keeps
the rows of the studies it ran in `benchmarks/records/claims/`, and writes the table of the README from all rows there;
`--write` writes it and runs nothing, `--show` prints the page of the documentation site from the kept rows. `--json`
prints counts by paper and by study instead of the page.
Only predicted claims test a model: those that a constant was fitted to, that are put in, or that cannot come out
otherwise are counted apart. So are values that this project derived or recalls, which nobody published as they stand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import causes
from benchmarks.recorded import ROOT
from benchmarks.unchanged import run
from dse.results.report import error_text, flips_text

ROWS = ROOT / "benchmarks" / "records" / "claims"
README = ROOT / "README.md"
PAGES = ROOT / "docs" / "papers"
PAGE_BEGIN, PAGE_END = "<!-- claims: python -m benchmarks.claims --pages -->", "<!-- end of claims -->"
"""Lines of a paper's page between which its claims stand."""
BEGIN, END = "<!-- trust: python -m benchmarks.claims --write -->", "<!-- end of trust -->"
"""Lines of the README between which the table by paper stands."""
STUDIES = (
    *("ficco_sweep", "ficco", "conccl", "t3_requests", "fused_workgroups", "goldyloc", "jitq", "comp_vs_comm", "bert"),
    *("seqpoint", "convolution_patterns", "gpgpusim", "cache_policies", "cache_policies_ptx", "operators"),
    "overlap_measured",
)
"""Studies that judge claims."""
PAPERS = {
    "ficco": "FiCCO",
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
    "hardware": "published values of hardware",
    "data": "published values of hardware",
    "overlap": "measured overlaps",
}
"""Start of a claim's id -> what it is of; a paper is judged by all of its studies together."""
_OURS = ("derived", "memory")
"""Provenances of values that nobody published as they stand: this project derived them, or recalls them."""
_BASES = ("fitted", "input", "by construction")

_HEAD = """# Claims

Published values and ours, judged by their tolerances; recorded by `python -m benchmarks.claims --record`. A paper has
one row over its studies that are listed: a claim that one of them misses is a miss. Only predicted claims test a
model. Fitted: a constant was fitted to them. Input: the published value, or a constant taken from it, is put in. By
construction: the model allows no other value. Errors are ours over the published value, less one. Flips: each
constant that was assumed, derived or recalled is moved alone, within its spread or by 20 %, and the claims are judged
again (`python -m dse results robustness study=<name> claims=true`); a verdict that turns rests on it. Empty cells
were not tested.
"""

Rows = Sequence[Mapping[str, Any]]
_CAUSES = """Experiments (`benchmarks/causes.yaml`): an input in doubt has another value, all else is as before, and the
study is judged again. The values are tried, not taken over: a row says how far an input would have to be off.
"""


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
    command = [
        sys.executable,
        "-m",
        "dse",
        "results",
        "robustness",
        f"study={study}",
        "claims=true",
        f"output_dir={folder}",
    ]
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


def by_paper(claims: Mapping[str, Rows]) -> dict[str, Rows]:
    """Paper -> one row for each of its claims, over all studies that judge it, `judged_by` them.

    A claim is missed where any study misses it, within where one tests it and none misses it, and else not tested.
    """
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for study, rows in claims.items():
        for row in rows:
            paper = PAPERS.get(row["id"].partition(".")[0], study)
            found.setdefault(paper, {}).setdefault(row["id"], []).append({**row, "judged_by": study})
    return {paper: [_strictest(rows) for rows in by_id.values()] for paper, by_id in found.items()}


def _strictest(rows: Rows) -> Mapping[str, Any]:
    """The row of a claim that says the worst of it: a miss before a hit, a hit before no test; with flips if asked."""
    rank = {False: 0, True: 1, None: 2}
    row = min(rows, key=lambda each: (rank[each["within"]], each["flips"] is None))
    judges = [each["judged_by"] for each in rows if each["within"] is not None]
    return {**row, "judged_by": ", ".join(f"`{study}`" for study in judges)}


def table(claims: Mapping[str, Rows]) -> Iterator[str]:
    """Lines of Markdown: a row for each paper and their sum."""
    papers = by_paper(claims)
    counts = {paper: count(rows) for paper, rows in papers.items()}
    columns = ["predicted, within", "predicted, missed", *_BASES, "not tested", "predicted that flip"]
    yield f"| claims of | judged by | {' | '.join(columns)} |"
    yield f"|---|---|{'--:|' * len(columns)}"
    for paper, numbers in counts.items():
        asked = any(row["flips"] is not None for row in papers[paper])
        cells = [str(number) for name, number in numbers.items() if name != "flipping"]
        cells += [str(numbers["flipping"]) if asked else "not asked"]
        yield f"| {paper} | {_judges(papers[paper])} | {' | '.join(cells)} |"
    total = [sum(numbers[name] for numbers in counts.values()) for name in next(iter(counts.values()))]
    yield f"| all | | {' | '.join(map(str, total))} |"


def trust(claims: Mapping[str, Rows]) -> Iterator[str]:
    """Lines of Markdown: a row for each paper, numbers of its abstract first, values of our own apart."""
    yield "| published by | judged by | abstract: within | abstract: missed or not tested | other published | our own |"
    yield "|---|---|--:|---|--:|--:|"
    totals = [0, 0, 0, 0, 0, 0]
    for paper, rows in by_paper(claims).items():
        kinds = _kinds(rows)
        words = ", ".join(_verdict_in_words(row) for row in kinds[0] if _verdict_in_words(row))
        scores = [number for kind in kinds for number in (len(_within(kind)), len(kind))]
        totals = [total + number for total, number in zip(totals, scores, strict=True)]
        yield f"| {paper} | {_judges(rows)} | {_score(*scores[:2])} | {words or '–'} | {_others(kinds)} |"
    yield f"| all | | {_score(*totals[:2])} | | {_score(*totals[2:4])} | {_score(*totals[4:])} |"


def _kinds(rows: Rows) -> tuple[Rows, Rows, Rows]:
    """Claims of the abstract, other published ones, and those that this project derived or recalls."""
    abstract = [row for row in rows if row["provenance"] == "abstract"]
    own = [row for row in rows if row["provenance"] in _OURS]
    return abstract, [row for row in rows if row["provenance"] not in ("abstract", *_OURS)], own


def _within(rows: Rows) -> Rows:
    """Claims that were predicted, and came out."""
    return [row for row in rows if row["within"] and row["basis"] == "predicted"]


def _score(within: int, total: int) -> str:
    return f"{within} of {total}" if total else "–"


def _others(kinds: tuple[Rows, Rows, Rows]) -> str:
    return " | ".join(_score(len(_within(kind)), len(kind)) for kind in kinds[1:])


def _judges(rows: Rows) -> str:
    """Studies that test a paper's claims."""
    judges = (study for row in rows for study in row["judged_by"].split(", ") if study)
    return ", ".join(dict.fromkeys(judges))


def _verdict_in_words(row: Mapping[str, Any]) -> str:
    """Words on a claim that is no prediction that came out; "" of one that is."""
    name = row["id"].partition(".")[2]
    if row["within"] is None:
        return f"{name} not tested"
    missed = f"missed {error_text(row)}".strip() if not row["within"] else ""
    basis = row["basis"] if row["basis"] != "predicted" else ""
    words = ", ".join(filter(None, [missed, basis]))
    return f"{name} {f'({words})' if basis else words}" if words else ""


def with_trust(page: str, claims: Mapping[str, Rows]) -> str:
    """A page with the table by paper between `BEGIN` and `END`. Raises ValueError where it has no such lines."""
    return _between(page, (BEGIN, END), trust(claims))


def _between(page: str, marks: tuple[str, str], lines: Iterable[str]) -> str:
    """A page with lines between two marks. Raises ValueError where it has no such marks."""
    before, begin, after = page.partition(marks[0])
    _, end, behind = after.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"no lines {marks[0]} and {marks[1]}")
    return "\n".join([f"{before}{begin}", "", *lines, "", f"{end}{behind}"])


def write() -> None:
    """Write the README's table from the rows that are kept."""
    README.write_text(with_trust(README.read_text("utf-8"), records()), encoding="utf-8")


def abstracts(claims: Mapping[str, Rows]) -> Iterator[str]:
    """Lines of Markdown: every number of an abstract with its verdict, and what judges it."""
    yield "| number of an abstract | says | published | ours | error | verdict | judged by |"
    yield "|---|---|--:|--:|--:|---|---|"
    for row in (row for rows in by_paper(claims).values() for row in _kinds(rows)[0]):
        verdict = {True: "within", False: "MISS", None: "not tested"}[row["within"]]
        verdict += f", {row['basis']}" if row["basis"] != "predicted" and row["within"] is not None else ""
        says = row["statement"].replace("|", "/")
        cells = [f"`{row['id']}`", says, _cells(row, name=False), verdict, row["judged_by"] or "–"]
        yield f"| {' | '.join(cells)} |"


def misses(claims: Mapping[str, Rows]) -> Iterator[str]:
    """Lines of Markdown: each claim that is missed, with what was published, what is ours, and the cause."""
    yield "| claim | published | ours | error | basis | verdict | why |"
    yield "|---|--:|--:|--:|---|---|---|"
    for row in (row for rows in by_paper(claims).values() for row in rows if row["within"] is False):
        why = row["reason"].replace("|", "/")
        yield f"| {_cells(row)} | {row['basis']} | {flips_text(row)} | {why} |"


def untested(claims: Mapping[str, Rows]) -> Iterator[str]:
    """Lines of Markdown: each claim that no study tests, and why."""
    yield "| claim | published | provenance | why |"
    yield "|---|--:|---|---|"
    for row in (row for rows in by_paper(claims).values() for row in rows if row["within"] is None):
        published = _cells(row, name=False).partition(" | ")[0]
        yield f"| `{row['id']}` | {published} | {row['provenance']} | {row['reason'].replace('|', '/')} |"


def experiments(claims: Mapping[str, Rows], *, tried: Rows) -> Iterator[str]:
    """Lines of Markdown: inputs that were changed alone to explain a miss, and what came of it. tried: kept rows."""
    yield "| claim | input | from | to | published | before | after | what is not known |"
    yield "|---|---|---|---|--:|--:|--:|---|"
    missed = {row["id"]: row for row in _missed(claims)}
    for row in (row for row in tried if row["claim"] in missed):
        inputs = row["to"]
        columns = [", ".join(f"`{path}`" for path in inputs), *(_inputs(row[end]) for end in ("from", "to"))]
        unit = "" if row["unit"] == "bool" else f" {row['unit']}"
        values = [_value(missed[row["claim"]], row[name], unit, name) for name in ("published", "before", "after")]
        values[2] += " (within)" if row["within"] else ""
        yield f"| `{row['claim']}` | {' | '.join([*columns, *values, row['why'].replace('|', '/')])} |"


def _value(claim: Mapping[str, Any], value: Any, unit: str, name: str) -> str:
    """A published value, or one of ours, in words; recollections are not shown as published."""
    if name == "published" and claim["provenance"] == "memory":
        return "unverified"
    return "–" if value is None else f"{_text(value)}{unit}"


def _inputs(values: Mapping[str, Any]) -> str:
    return "; ".join(_input(value) for value in values.values())


def _input(value: Any) -> str:
    if isinstance(value, Mapping):  # by the option that is searched
        return ", ".join(f"{_input(each)} ({option})" for option, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _missed(claims: Mapping[str, Rows]) -> Rows:
    return [row for rows in by_paper(claims).values() for row in rows if row["within"] is False]


def flipping(claims: Mapping[str, Rows]) -> Iterator[str]:
    """Lines of Markdown: each claim that is within and would not be with another value of an uncertain constant."""
    yield "| claim | published | ours | error | basis | verdict |"
    yield "|---|--:|--:|--:|---|---|"
    for row in (row for rows in by_paper(claims).values() for row in rows if row["within"] and row["flips"]):
        yield f"| {_cells(row)} | {row['basis']} | {flips_text(row)} |"


def _cells(row: Mapping[str, Any], *, name: bool = True) -> str:
    """Claim (if name), published value, ours and its error."""
    unit = "" if row["unit"] == "bool" else f" {row['unit']}"
    published = "unverified" if row["provenance"] == "memory" else f"{_text(row['published'])}{unit}"
    ours = "–" if row["ours"] is None else f"{_text(row['ours'])}{unit}"
    return f"`{row['id']}` | " * name + f"{published} | {ours} | {error_text(row)}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " to ".join(f"{number:.3g}" for number in value) if isinstance(value, list) else f"{value:.3g}"


def report(claims: Mapping[str, Rows]) -> str:
    """The page."""
    parts = [_HEAD, *table(claims), "", "## Numbers of abstracts", "", *abstracts(claims), "", "## Missed", ""]
    parts += [*misses(claims), "", "## What would move them", "", _CAUSES, *experiments(claims, tried=causes.records())]
    parts += ["", "## Not tested", "", *untested(claims), "", "## Within, and flips", ""]
    return "\n".join([*parts, *flipping(claims), ""])


def counts(claims: Mapping[str, Rows]) -> dict[str, Any]:
    """Counts of claims by paper, over all studies that judge it, and by study; of abstracts and others; of causes."""
    papers, every = by_paper(claims), [row for rows in by_paper(claims).values() for row in rows]
    abstract, other, _ = _kinds(every)
    explained = {row["claim"] for row in causes.records() if row["after"] not in (None, row["before"])}
    return {
        "abstract_within": len(_within(abstract)),
        "abstract_total": len(abstract),
        "other_within": len(_within(other)),
        "other_total": len(other),
        "fitted": sum(row["basis"] == "fitted" for row in every),
        "causes_missing": sum(row["id"] not in explained for row in _missed(claims)),
        "papers": {paper: count(rows) for paper, rows in papers.items()},
        "studies": {study: count(rows) for study, rows in claims.items()},
    }


def write_pages(claims: Mapping[str, Rows]) -> None:
    """Write the claims of each paper, and what would move those that are missed, into its page."""
    for paper in dict.fromkeys(PAPERS.values()):
        names = [name for name, published_by in PAPERS.items() if published_by == paper]
        path = PAGES / f"{names[0]}.md"
        if path.exists():
            of_paper = {
                study: [row for row in rows if row["id"].partition(".")[0] in names] for study, rows in claims.items()
            }
            page = _between(path.read_text("utf-8"), (PAGE_BEGIN, PAGE_END), _of_paper(of_paper))
            path.write_text(page, encoding="utf-8")


def _of_paper(claims: Mapping[str, Rows]) -> Iterator[str]:
    """Lines of Markdown: the numbers of a paper's abstract, its misses, and what would move them."""
    yield from (*abstracts(claims), "")
    if _missed(claims):
        yield from (*misses(claims), "", *experiments(claims, tried=causes.records()), "")
    yield "[How far to trust an answer](../explanation/trust.md) explains these tables and their columns."


def main() -> int:
    """Judge and print, or record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", help="studies to judge; all that have claims by default")
    parser.add_argument("--flips", action="store_true", help="judge again under uncertain constants: minutes a study")
    parser.add_argument("--record", action="store_true", help="keep the rows, and write the README's table")
    parser.add_argument("--write", action="store_true", help="write the README's table from the rows that are kept")
    parser.add_argument("--show", action="store_true", help="print the page of claims from the rows that are kept")
    parser.add_argument("--json", action="store_true", help="print counts; with --show, of the rows that are kept")
    parser.add_argument("--causes", action="store_true", help="run the experiments on claims that are missed")
    parser.add_argument("--pages", action="store_true", help="write the claims of each paper into its page")
    words = parser.parse_args()
    page = (lambda claims: json.dumps(counts(claims), indent=1)) if words.json else report
    if words.causes:
        causes.record(words.studies or STUDIES, records())
    if words.pages:
        write_pages(records())
    if words.write:
        write()
    if words.causes or words.pages or words.write:
        return 0
    if words.show:
        print(page(records()))
        return 0
    claims = dict[str, Rows]()
    for study in words.studies or STUDIES:
        claims[study] = judged(study, flips=words.flips)
        if words.record:
            keep(study, claims[study])
        print(f"{study}: {count(claims[study])}", file=sys.stderr, flush=True)
    print(page(claims))
    if words.record:
        write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
