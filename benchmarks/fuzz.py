"""Command lines, configurations, output folders and files that nobody should write, and what dse makes of them.

Every case is drawn from a seed, runs in a process of its own that is forked from one that has imported everything, and
must end within 30 s with an exit code of the documented ones, without a traceback and in bounded memory. One that does
not end in time is run once more at the end, as the machine may have been busy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import readers
from benchmarks.field import CHECK, cases, trials
from benchmarks.spoiling import VALUES, slip, spoil
from tests.campaigns.forked import CommandEnd, Commands, import_all, inside, show_progress

_SHOWN = 10

_STUDY = "study=ficco_sweep"
_SMALL = ["schedule=serial", "workload.only=[g4]", "tracking=none", "fidelity=none"]
_RUN = [_STUDY, *_SMALL, "store=none", "timeline=false", "budget.trials=4", "executor.jobs=1"]
_OTHER = "2026-01-01_00-00-00"
_COMMANDS = [
    *(
        ["results", "report", _STUDY],
        ["results", "rules", _STUDY],
        ["results", "compare", "ficco_sweep", f"ficco_sweep/{_OTHER}"],
    ),
    *(
        ["results", "importance", _STUDY],
        ["results", "robustness", _STUDY, "samples=2", "vary=system.gpu.hbm_bytes_per_s=0.1"],
    ),
    *(
        ["results", "timeline", _STUDY, "key=0"],
        ["results", "timeline", _STUDY, "key=a"],
        ["store", "sync", _STUDY, "optuna=trials.log"],
        ["store", "check"],
    ),
]
_READERS = [
    *(
        ["profile", "import", "profile="],
        ["profile", "advise", "system=h100_8", "profile="],
        ["profile", "explain", ""],
        ["machine", "collective", "schedule="],
    ),
    *(["plan", "system=h100_8", "tracking=none", "model="], ["plan", "model=llama3_8b", "tracking=none", "plan="]),
    *(["settings", "import", "from=megatron", "settings="], ["settings", "import", "from=vllm", "settings="]),
    *(
        ["machine", "calibrate", "system=h100_8", "out=fitted", "data="],
        ["machine", "import", "system=h100_8", "file="],
    ),
]
"""Commands that read a stranger's file, whose name their last word ends in."""
_NUMBERS = ["0", "-1", "1", "7", "1e9", "1e308", "-1e-320", "1e999", "99999999999999999999999", "nan", "inf", "0.1"]


@dataclass(frozen=True)
class Case:
    """A command line, and what is done to the folder that it is typed in, in words."""

    number: int
    words: tuple[str, ...]
    told: str


# ---------------------------------------------------------------- what is drawn


def case(number: int, seed: int, folder: Path, made: Path) -> Case:
    """A case, whose folder is made. made: with an output folder and a configuration to spoil."""
    draw = random.Random(f"{seed}:{number}")
    kinds = (_overridden, _spanned, _configured, _configured, _damaged, _damaged, _damaged)
    kind = draw.choice((*kinds, *[_foreign] * 7, *[_read] * 4, _stored))
    folder.mkdir(parents=True)
    words, told = kind(draw, folder, made)
    return Case(number, tuple(word.replace("\0", "") for word in words), told)


def _overridden(draw: random.Random, folder: Path, made: Path) -> tuple[list[str], str]:
    """Values, keys and grammar of overrides."""
    paths = json.loads((made / "paths.json").read_text("utf-8"))
    extra = []
    for _ in range(draw.randint(1, 3)):
        key = draw.choice(paths)
        key = draw.choice((key, key, key, slip(draw, key), f"{key}._target_", f"{key}.a.b", f"{key}@hydra", ""))
        value = _written(draw.choice(VALUES), draw)
        extra.append(draw.choice(("", "", "", "+", "++", "~")) + draw.choice((key, f"{key}={value}", f"{key}={value}")))
    flags = draw.choice(
        ([], [], [], ["--cfg", "job"], ["--cfg", "job", "--resolve"], ["--multirun"], ["--help"], ["-x"])
    )
    return [*draw.choice((["--dry-run"], [])), *_RUN, *extra, *flags] if not flags else [
        *_RUN,
        *extra,
        *flags,
    ], "overrides"


def _spanned(draw: random.Random, folder: Path, made: Path) -> tuple[list[str], str]:
    """Sweeps over the space."""
    paths = json.loads((made / "paths.json").read_text("utf-8"))
    words = [
        f"{draw.choice(('+', '', '++'))}space.{draw.choice(paths)}={_sweep(draw)}" for _ in range(draw.randint(1, 2))
    ]
    return [*draw.choice((["--dry-run"], ["--dry-run"], [])), *_RUN, *words], "space"


def _sweep(draw: random.Random) -> str:
    a, b, c = (draw.choice(_NUMBERS) for _ in range(3))
    inner = f"interval({a},{b})"
    return draw.choice(
        (
            *(f"range({a},{b})", f"range({a},{b},{c})", f"range(1,{draw.choice(('5', '1e3', '1e12'))},{c})", inner),
            *(f"tag(log,{inner})", f"tag(log,range({a},{b}))", f"tag({a},{b})", f"choice({a},{b},{c})", "choice()"),
            *("glob(*)", "glob([a*,b*])", f"glob(*,exclude={a})", f"sort(choice({a},{b}))", f"shuffle(range({a},{b}))"),
            *(f"choice([{a}],{{x:{b}}})", f"choice(choice({a}))", f"{a},{b}", f"range({a}", f"interval({a})", "int(x)"),
            *(
                f"extend_list({a})",
                "choice(serial,shard_p2p)",
                "choice(serial,absent)",
                _written(draw.choice(VALUES), draw),
            ),
        )
    )


def _configured(draw: random.Random, folder: Path, made: Path) -> tuple[list[str], str]:
    """A folder of configurations with one option that is spoilt."""
    group = draw.choice(("system", "workload", "study", "simulator", "search", "schedule"))
    source = made / "conf" / f"{group}.yaml"
    path = folder / "conf" / group / "mine.yaml"
    path.parent.mkdir(parents=True)
    shutil.copy(source, path)
    told = spoil(draw, path)
    words = [word for word in _RUN if not word.startswith(f"{group}=")]
    flags = draw.choice(([], [], [], ["--cfg", "job"], ["--help"], ["--multirun"]))
    start = [] if flags else draw.choice((["--dry-run"], []))
    return [*start, *words, f"{group}=mine", "--config-dir=conf", *flags], f"conf/{group}: {told}"


def _damaged(draw: random.Random, folder: Path, made: Path) -> tuple[list[str], str]:
    """An output folder with damaged files."""
    shutil.copytree(made / "outputs", folder / "outputs", symlinks=True)
    run = (folder / "outputs" / "ficco_sweep" / "latest").resolve()
    told = []
    for _ in range(draw.randint(1, 2)):
        names = ["results.parquet"] * 3 + ["summary.json", "provenance.json", "config.yaml"] * 2
        name = draw.choice([*names, "timelines.parquet", "claims.json", "figures", "../../results.db"])
        path = run / name
        if path.is_file() and not path.is_symlink():
            told.append(f"{name}: {spoil(draw, path)}")
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
            path.symlink_to(draw.choice(("/tmp", "absent", "..")))
            told.append(f"{name}: a link")
    return draw.choice(_COMMANDS), ", ".join(told)


def _foreign(draw: random.Random, folder: Path, made: Path) -> tuple[list[str], str]:
    """A stranger's file, spoilt: a profile, a schedule, a plan, settings, a model, a topology, a table."""
    case = draw.choice(cases())
    shutil.copytree(case, folder, dirs_exist_ok=True)
    trial = draw.choice(trials(case))
    inputs = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in (CHECK, "README.md")]
    inputs = [path for path in inputs if path.suffix != ".py"]  # a program of one's own may end in a traceback
    named = [path for path in inputs if any(path.name in word for word in trial.check.command)]
    path = draw.choice(named or inputs)
    told = spoil(draw, path)
    if draw.random() < 0.2 and path.is_file():
        told += f", {spoil(draw, path)}"
    other = draw.choice(_READERS)
    words = list(trial.check.command) if draw.random() < 0.8 else [*other[:-1], other[-1] + path.name]
    return words, f"{case.name}/{path.name}: {told}"


def _read(draw: random.Random, folder: Path, made: Path) -> tuple[list[str], str]:
    """A file of a kind that no case of the field has, spoilt."""
    name = draw.choice(sorted(readers.READERS))
    reader = readers.READERS[name]
    for file in reader.files:
        shutil.copy(made / "readers" / file, folder / file)
    if reader.outputs:
        shutil.copytree(made / "outputs", folder / "outputs", symlinks=True)
    path = folder / draw.choice(reader.files)
    told = spoil(draw, path)
    if draw.random() < 0.2 and path.is_file():
        told += f", {spoil(draw, path)}"
    return list(reader.command), f"{name}, {path.name}: {told}"


def _stored(draw: random.Random, folder: Path, made: Path) -> tuple[list[str], str]:
    """A stranger's store."""
    (folder / "outputs").mkdir()
    path = folder / "outputs" / "results.db"
    shutil.copy(made / "outputs" / "results.db", path)
    told = spoil(draw, path)
    store_words = [word for word in _RUN if not word.startswith("store=")]
    return draw.choice((["store", "check"], ["store", "status"], [*store_words, "store=auto"])), f"results.db: {told}"


def _written(value: Any, draw: random.Random) -> str:
    """A value as somebody might type it."""
    text = value if isinstance(value, str) else json.dumps(value)
    return draw.choice(
        (text, text, text, f"'{text}'", f'"{text}', f"[{text}", f"{{{text}}}", f"{text},{text}", "\udcff")
    )


# ---------------------------------------------------------------- running


def prepare(made: Path) -> None:
    """A finished run, options to spoil, and the paths of a configuration; in a process of its own."""
    made.mkdir(parents=True)
    if (child := os.fork()) == 0:
        code = inside(made, lambda: _prepared(made))
        os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError((made / "stderr.txt").read_text("utf-8", "replace"))


def _prepared(made: Path) -> int:
    from dse.analysis.compare import flat
    from dse.cli import main
    from dse.config.compose import request
    from dse.config.options import conf_dir

    words = [_STUDY, "schedule=serial", "workload.only=[g1,g4]", "tracking=none", "fidelity=none", "executor.jobs=1"]
    if code := main(words):
        return code
    study = made / "outputs" / "ficco_sweep"
    shutil.copytree((study / "latest").resolve(), study / _OTHER)
    readers.lay_out(made / "readers")
    readers.lay_out_views(made / "readers", main)
    tree = request(_RUN).tree
    (made / "paths.json").write_text(json.dumps(list(flat(tree))), encoding="utf-8")
    (made / "conf").mkdir()
    options = {"system": "mi300x_8", "workload": "table1", "study": "ficco_sweep", "simulator": "external"}
    for group, option in {**options, "search": "nsga2", "schedule": "serial"}.items():
        source = conf_dir() / group / f"{option}.yaml"
        source = source if source.exists() else sorted((conf_dir() / group).glob("*.yaml"))[0]
        text = source.read_text("utf-8").replace(f"name: {source.stem}", "name: mine", 1)
        (made / "conf" / f"{group}.yaml").write_text(text, encoding="utf-8")
    return 0


def run(numbers: Sequence[int], seed: int, keep: Path, jobs: int) -> Iterator[CommandEnd[Case]]:
    """Run the cases of some numbers, some at a time; each as it ends. keep: where folders of offenders are left."""
    made = keep / "made"
    prepare(made)
    import_all()
    commands, left = Commands[Case](), list(reversed(numbers))
    again = list[int]()
    while left or commands.running:
        while left and len(commands.running) < jobs:
            number = left.pop()
            folder = keep / f"case_{number}"
            drawn = case(number, seed, folder, made)
            commands.start(drawn, drawn.words, folder)
        for ended in commands.ended():
            if ended.hang and ended.case.number not in again:  # the machine may have been busy: once more, at the end
                again.append(ended.case.number)
                print(f"case {ended.case.number} did not end in time: it is run again at the end", file=sys.stderr)
                left.insert(0, ended.case.number)
                shutil.rmtree(ended.folder, ignore_errors=True)
                continue
            if not (ended.traceback or ended.hang):
                shutil.rmtree(ended.folder, ignore_errors=True)
            yield ended


def figures(found: Sequence[CommandEnd[Case]]) -> dict[str, float]:
    """Counts, and the largest memory of a case [MB]."""
    counts = {"cases": len(found), "tracebacks": sum(one.traceback for one in found)}
    memory = max((one.memory_mb for one in found), default=0.0)
    return {**counts, "hangs": sum(one.hang for one in found), "max_memory_mb": round(memory, 1)}


def offenders(found: Sequence[CommandEnd[Case]], keep: Path) -> list[str]:
    """The first cases that ended badly, and the one that took most memory: what is wrong, and how to see it again."""
    told = []
    for one in [one for one in found if one.traceback or one.hang][:_SHOWN]:
        last = (one.errors.strip().splitlines() or [""])[-1][:160]
        what = "hangs" if one.hang else f"exit code {one.code}: {last}"
        line = shlex.join(["python", "-m", "dse", *one.case.words]).encode("utf-8", "backslashreplace").decode()
        told.append(f"case {one.case.number} ({one.case.told}) {what}\n  cd {keep}/case_{one.case.number} && {line}")
    most = max(found, key=lambda one: one.memory_mb, default=None)
    return (
        [*told, f"most memory: {most.memory_mb:.0f} MB by case {most.case.number} ({most.case.told})"] if most else told
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run the cases and print what came of them; 1 where one ended badly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object with the figures")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run the case of this number alone")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--keep", type=Path, help="an empty folder where those of offenders are left")
    asked = parser.parse_args(words)
    keep = (asked.keep or Path(tempfile.mkdtemp(prefix="dse-fuzz-"))).resolve()
    numbers = range(asked.cases) if asked.only is None else [asked.only]
    found: list[CommandEnd[Case]] = []
    began = time.monotonic()
    for one in run(numbers, asked.seed, keep, asked.jobs):
        found.append(one)
        show_progress(len(found), len(numbers), began)
    told = figures(found)
    _print(told, offenders(found, keep), as_json=asked.json)
    return 1 if told["tracebacks"] or told["hangs"] else 0


def _print(told: Mapping[str, float], bad: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(told, indent=2))
        print("\n".join(bad), file=sys.stderr)
    else:
        print("\n".join([*(f"{name:<15}{value:>10,}" for name, value in told.items()), "", *bad]))


if __name__ == "__main__":
    sys.exit(main())
