"""Results and claims of studies as they were at another commit, value by value.

`python -m benchmarks.unchanged <commit> [<study> ...]` runs each study with the code of that commit and with the
present code, without a store, and compares the tables and the claims: equal to the last bit. Keys are compared by which
rows they tell apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.recorded import ROOT

LONG = ("search_benchmark",)
"""Studies that take longer than all others together: they are compared when they are named."""
QUIET = ("tracking=none", "store=none", "timeline=false")


def studies() -> list[str]:
    """Names of the shipped studies but the long ones."""
    folders = [ROOT / "conf" / "study", *ROOT.glob("plugins/*/dse_*/conf/study")]
    return sorted(path.stem for folder in folders for path in folder.glob("*.yaml") if path.stem not in LONG)


def run(tree: Path, study: str, folder: Path, *words: str) -> str:
    """Run a study with the code below `tree`, writing below `folder`; why it failed, or ""."""
    command = [sys.executable, "-m", "dse", f"study={study}", f"output_dir={folder}", *QUIET, *words]
    places = [tree, *sorted(tree.glob("plugins/*"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    return done.stderr.strip()[-500:] if done.returncode else ""


def with_numbered_keys(table: pd.DataFrame) -> pd.DataFrame:
    """A table with keys as the place of their first row, which does not depend on how keys are made."""
    columns = [name for name in ("key", "baseline") if name in table]
    codes, _ = pd.factorize(table[columns].to_numpy().T.ravel())
    return table.assign(**dict(zip(columns, codes.reshape(len(columns), len(table)), strict=True)))


def differences(before: Path, after: Path) -> list[str]:
    """What differs between the tables and the claims of two finished runs."""
    old, new = (pd.read_parquet(folder / "results.parquet") for folder in (before, after))
    if old.shape != new.shape or list(old) != list(new):
        return [f"the table was {old.shape} and is {new.shape}, columns {sorted(map(str, set(old) ^ set(new)))}"]
    old, new = with_numbered_keys(old), with_numbered_keys(new)
    found = [f"column {name}" for name in old if not _same(old[name], new[name])]
    old_claims, new_claims = (_claims(folder) for folder in (before, after))
    return found + ["claims.json"] * (old_claims != new_claims)


def _claims(folder: Path) -> list[dict[str, Any]]:
    """Claims of a run with what was found, without the wording of reasons."""
    rows = json.loads((folder / "claims.json").read_text("utf-8"))
    return [{name: value for name, value in row.items() if name != "reason"} for row in rows]


def _same(old: pd.Series[Any], new: pd.Series[Any]) -> bool:
    missing = old.isna().to_numpy()
    if not np.array_equal(missing, new.isna().to_numpy()):
        return False
    return bool(np.array_equal(old.to_numpy()[~missing], new.to_numpy()[~missing]))


def compare(commit: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Study -> what differs from its results at a commit; studies are printed as they are done."""
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            for study in names:
                places = [Path(folder) / name for name in ("old", "new")]
                failed = [run(code, study, place) for code, place in zip((tree, ROOT), places, strict=True)]
                runs = [place / study / "latest" for place in places]
                found[study] = [f"failed: {reason}" for reason in failed if reason] or differences(*runs)
                print(f"{study:<20}{'as before' if not found[study] else '; '.join(found[study])}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    return found


def main() -> int:
    """Compare; 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unchanged", description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the commit to compare with, such as HEAD~1")
    parser.add_argument("studies", nargs="*", help="studies to compare; all but the long ones by default")
    words = parser.parse_args()
    found = compare(words.commit, words.studies or studies())
    changed = sum(bool(each) for each in found.values())
    print(f"{len(found)} studies, {changed} of them changed")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
