"""Command lines, configurations and output folders that nobody should write, and what `python -m dse` makes of them.

Every case is drawn from a seed, runs in a process of its own that is forked from one that has imported everything, and
must end within 30 s with an exit code of the documented ones, without a traceback and in bounded memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DOCUMENTED = (0, 2, 3, 4, 130, 143)
"""Exit codes that a command may end with."""
_HANG_S = 30.0
_ADDRESSES = 16 << 30  # bytes of address space of a case, so that a bomb does not take the machine with it
_SHOWN = 10

_STUDY = "study=ficco_sweep"
_SMALL = ["schedule=serial", "workload.only=[g4]", "tracking=none", "fidelity=none"]
_RUN = [_STUDY, *_SMALL, "store=none", "timeline=false", "budget.trials=4", "executor.jobs=1"]
_OTHER = "2026-01-01_00-00-00"
_COMMANDS = [
    *(["report", _STUDY], ["rules", _STUDY], ["compare", "ficco_sweep", f"ficco_sweep/{_OTHER}"]),
    *(["importance", _STUDY], ["robustness", _STUDY, "samples=2", "vary=system.gpu.hbm_bytes_per_s=0.1"]),
    *(["timeline", _STUDY, "key=0"], ["timeline", _STUDY, "key=a"], ["sync", _STUDY, "optuna=trials.log"], ["check"]),
]
_NUMBERS = ["0", "-1", "1", "7", "1e9", "1e308", "-1e-320", "1e999", "99999999999999999999999", "nan", "inf", "0.1"]
_VALUES: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        2**70,
        -(2**70),
        1e308,
        float("nan"),
        float("inf"),
        0.1,
        "",
        " ",
        "x" * 5000,
        "µ\u202e\U0001f600",
    ),
    *("4:1", "0x10", "010", "1_000", "on", "null", "12 GB/s", "-3 us", "${seed}", "${oc.env:HOME}", "${absent}", "???"),
    *(
        [],
        {},
        [[]],
        [1, "a", None],
        {"a": {"b": {"c": 1}}},
        {"_target_": "os.system"},
        "../../etc/passwd",
        "a\0b",
        "\ufeff",
    ),
]


@dataclass(frozen=True)
class Case:
    """A command line, and what is done to the folder that it is typed in, in words."""

    number: int
    words: tuple[str, ...]
    told: str


@dataclass
class Ended:
    """How a case ended. code: exit code, negative for a signal, None where it was stopped after 30 s."""

    case: Case
    code: int | None
    memory_mb: float
    seconds: float
    errors: str

    @property
    def traceback(self) -> bool:
        """Whether it ended in a traceback, by a signal, or with an exit code that means nothing."""
        return self.code is not None and (self.code not in DOCUMENTED or "Traceback (most recent" in self.errors)

    @property
    def hang(self) -> bool:
        """Whether it had to be stopped."""
        return self.code is None


# ---------------------------------------------------------------- what is drawn


def case(number: int, seed: int, folder: Path, made: Path) -> Case:
    """A case, whose folder is made. made: with an output folder and a configuration to spoil."""
    draw = random.Random(f"{seed}:{number}")
    kind = draw.choice((_overridden, _spanned, _configured, _configured, _damaged, _damaged, _damaged))
    folder.mkdir(parents=True)
    words, told = kind(draw, folder, made)
    return Case(number, tuple(word.replace("\0", "") for word in words), told)


def _overridden(draw: random.Random, folder: Path, made: Path) -> tuple[list[str], str]:
    """Values, keys and grammar of overrides."""
    paths = json.loads((made / "paths.json").read_text("utf-8"))
    extra = []
    for _ in range(draw.randint(1, 3)):
        key = draw.choice(paths)
        key = draw.choice((key, key, key, _spoilt(draw, key), f"{key}._target_", f"{key}.a.b", f"{key}@hydra", ""))
        value = _written(draw.choice(_VALUES), draw)
        extra.append(draw.choice(("", "", "", "+", "++", "~")) + draw.choice((key, f"{key}={value}", f"{key}={value}")))
    flags = draw.choice(
        ([], [], [], ["--cfg", "job"], ["--cfg", "job", "--resolve"], ["--multirun"], ["--help"], ["-x"])
    )
    return [*draw.choice((["dry-run"], [])), *_RUN, *extra, *flags] if not flags else [
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
    return [*draw.choice((["dry-run"], ["dry-run"], [])), *_RUN, *words], "space"


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
                _written(draw.choice(_VALUES), draw),
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
    told = _spoil(draw, path)
    words = [word for word in _RUN if not word.startswith(f"{group}=")]
    flags = draw.choice(([], [], [], ["--cfg", "job"], ["--help"], ["--multirun"]))
    start = [] if flags else draw.choice((["dry-run"], []))
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
            told.append(f"{name}: {_spoil(draw, path)}")
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
            path.symlink_to(draw.choice(("/tmp", "absent", "..")))
            told.append(f"{name}: a link")
    return draw.choice(_COMMANDS), ", ".join(told)


# ---------------------------------------------------------------- how a file is spoilt


def _spoil(draw: random.Random, path: Path) -> str:
    """Damage a file in one way; which."""
    ways: list[Callable[[random.Random, Path], object]] = [_cut, _flip, _flip, _swap, _replace, _garbage, _bomb]
    if path.suffix in (".yaml", ".json"):
        ways += [_edit] * 6
    way = draw.choice(ways)
    return f"{way.__name__.removeprefix('_')} {way(draw, path) or ''}".strip()


def _cut(draw: random.Random, path: Path) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def _flip(draw: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 3, 30))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _swap(draw: random.Random, path: Path) -> str:
    """Another file of the folder in its place."""
    others = sorted(one for one in path.parent.iterdir() if one.is_file() and one != path)
    if others:
        shutil.copy(other := draw.choice(others), path)
        return other.name
    return ""


def _replace(draw: random.Random, path: Path) -> str:
    """Something in its place that is no plain file."""
    path.unlink()
    kind = draw.choice(("pipe", "folder", "/dev/zero", "/etc/hostname", "absent", "itself", "gone"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "gone":
        path.symlink_to(path.name if kind == "itself" else kind)
    return kind


def _garbage(draw: random.Random, path: Path) -> None:
    path.write_bytes(
        draw.choice((b"", b"\0" * 4096, draw.randbytes(4096), b"PAR1" + draw.randbytes(99) + b"PAR1", b"\xff\xfe"))
    )


def _bomb(draw: random.Random, path: Path) -> None:
    """A text that stands for far more than it is."""
    aliases = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    aliases += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
    texts = (aliases, "[" * 50_000, "a: " + "9" * 200_000, "a: 1" + ":59" * 200_000, '{"a":' * 30_000, "? [a]\n: b\n")
    path.write_text(draw.choice((*texts, "a: !!python/object/apply:os.getcwd []\n", "x: [" + "1," * 300_000 + "]\n")))


def _edit(draw: random.Random, path: Path) -> str:
    """Other values or keys in a tree."""
    try:
        tree = yaml.safe_load(path.read_text("utf-8"))
    except (ValueError, yaml.YAMLError, RecursionError):  # it was spoilt before
        return "nothing"
    for _ in range(draw.choice((1, 1, 2))):
        owner, key = draw.choice(list(_places(tree)) or [({}, "")])
        what = draw.choice(("value", "value", "value", "key", "gone"))
        if what == "value":
            owner[key] = draw.choice(_VALUES)
        elif isinstance(owner, dict):
            value = owner.pop(key, None)
            owner |= {_spoilt(draw, str(key)): value} if what == "key" else {}
    text = json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")
    return str(key)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(mapping or list, key) of every value of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _places(value)


def _spoilt(draw: random.Random, name: str) -> str:
    """A name with a slip in it."""
    place = draw.randrange(len(name) + 1)
    return draw.choice(
        (name[:place] + name[place + 1 :], name + "s", name.upper(), name[::-1], "_target_", "a.b", "µ", "0")
    )


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
        code = _inside(made, lambda: _prepared(made))
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


def _inside(folder: Path, work: Callable[[], int]) -> int:
    """The exit code of work in a folder, as a process of its own would end; what it prints is in files there."""
    os.chdir(folder)
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
    for number, name in ((0, os.devnull), (1, "stdout.txt"), (2, "stderr.txt")):
        os.dup2(
            os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600) if number else os.open(name, os.O_RDONLY), number
        )
    try:
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


@dataclass
class Runner:
    """Runs cases, some at a time. keep: where the folders of offenders are left."""

    keep: Path
    made: Path
    seed: int
    running: dict[int, tuple[Case, Path, int, float]] = field(default_factory=dict)

    def start(self, number: int) -> None:
        """Fork a case."""
        from dse.cli import main

        folder = self.keep / f"case_{number}"
        asked = case(number, self.seed, folder, self.made)
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            sys.argv = ["dse", *asked.words]
            os._exit(_inside(folder, lambda: main(asked.words)))
        self.running[os.pidfd_open(child)] = (asked, folder, child, time.monotonic())

    def ended(self) -> Iterator[Ended]:
        """The cases that ended since, after waiting for one; those that take too long are stopped."""
        poll = select.poll()
        for descriptor in self.running:
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(500)}
        for descriptor, (asked, folder, child, began) in list(self.running.items()):
            taken = time.monotonic() - began
            late = descriptor not in ready and taken > _HANG_S
            if late:
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
            if late or descriptor in ready:
                del self.running[descriptor]
                os.close(descriptor)
                yield self._of(asked, folder, child, taken, late=late)

    def _of(self, asked: Case, folder: Path, child: int, taken: float, *, late: bool) -> Ended:
        _, status, used = os.wait4(child, 0)
        with suppress(ProcessLookupError):  # of what it started nothing may go on
            os.killpg(child, signal.SIGKILL)
        errors = (folder / "stderr.txt").read_text("utf-8", "replace") if (folder / "stderr.txt").exists() else ""
        code = None if late else os.waitstatus_to_exitcode(status)
        found = Ended(asked, code, used.ru_maxrss / 1024, taken, errors)
        if not (found.traceback or found.hang):
            shutil.rmtree(folder, ignore_errors=True)
        return found


def run(numbers: Sequence[int], seed: int, keep: Path, jobs: int) -> Iterator[Ended]:
    """Run the cases of some numbers; each as it ends."""
    made = keep / "made"
    prepare(made)
    _import()
    runner, left = Runner(keep, made, seed), list(reversed(numbers))
    while left or runner.running:
        while left and len(runner.running) < jobs:
            runner.start(left.pop())
        yield from runner.ended()


def _import() -> None:
    """Import what commands import, which starts no thread."""
    import dse.run_study  # noqa: F401
    from dse import plugins

    for kind in plugins.KINDS:
        plugins.available(kind)


def figures(found: Sequence[Ended]) -> dict[str, float]:
    """Counts, and the largest memory of a case [MB]."""
    counts = {"cases": len(found), "tracebacks": sum(one.traceback for one in found)}
    memory = max((one.memory_mb for one in found), default=0.0)
    return {**counts, "hangs": sum(one.hang for one in found), "max_memory_mb": round(memory, 1)}


def offenders(found: Sequence[Ended], keep: Path) -> list[str]:
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


def _progress(done: int, total: int, began: float) -> None:
    taken = time.monotonic() - began
    rate = done / taken if taken else 0.0
    left = f"{(total - done) / rate:,.0f} s left" if rate else ""
    end = "\r" if sys.stderr.isatty() and done < total else "\n"
    if end == "\r" or done % 25 == 0 or done == total:
        print(f"{done}/{total} cases, {rate:.1f} cases/s, {left}   ", file=sys.stderr, end=end, flush=True)


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
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    keep = (asked.keep or Path(tempfile.mkdtemp(prefix="dse-fuzz-"))).resolve()
    numbers = range(asked.cases) if asked.only is None else [asked.only]
    found: list[Ended] = []
    began = time.monotonic()
    for one in run(numbers, asked.seed, keep, asked.jobs):
        found.append(one)
        _progress(len(found), len(numbers), began)
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
