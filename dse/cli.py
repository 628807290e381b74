"""The command line: `python -m dse study=<name> [group=option ...] [path=value ...]`, and commands beside it.

Exit codes: 0 done; 2 configuration refused, nothing evaluated; 3 too many points failed; 4 the environment failed
(disk, database, permissions), what was recorded is kept; 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dse import plugins
from dse.config.compose import (
    OWN_FLAGS,
    check_expansion,
    check_foreign,
    conf_dir,
    listing,
    overrides,
    own_folder,
    request,
    told_by_hydra,
)
from dse.errors import Broken, ConfigError, Problem, Problems, did_you_mean

OK, REFUSED, FAILED_POINTS, ENVIRONMENT, INTERRUPTED = 0, 2, 3, 4, 130
Command = Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Nothing that a user can cause ends in a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    atexit.register(gc.freeze)  # or the interpreter spends a second at its end on looking for garbage
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no µ is no reason to fail
    try:
        return _exit_code(lambda: _dispatch(words))
    except KeyboardInterrupt as error:
        print(str(error) or "interrupted", file=sys.stderr)
        return 128 + getattr(error, "number", INTERRUPTED - 128)


def _exit_code(command: Callable[[], int]) -> int:
    """Run a command; its exit code, also where it is refused or fails, which is told."""
    try:
        return command()
    except ConfigError as error:
        _refuse(error)
        return REFUSED
    except Broken as error:
        print(error, file=sys.stderr)
        return FAILED_POINTS
    except OSError as error:
        print(f"the environment failed: {error}", file=sys.stderr)
        return ENVIRONMENT


def _dispatch(words: list[str]) -> int:
    if not words or "--help" in words or "-h" in words:
        print(_help(own_folder(words)))
        return OK
    if "=" not in words[0] and not words[0].startswith(("-", "+", "~")):
        return _command(words[0])(words[1:])
    if _needs_hydra(words):
        return _hydra(words)
    from dse.commands import run

    return run(request(overrides(words), own_folder(words)))


def _refuse(error: ConfigError) -> None:
    count = len(error.problems)
    print(f"refused, nothing was evaluated: {count} problem{'s' if count > 1 else ''}", file=sys.stderr)
    for problem in error.problems:
        print(f"  {problem}", file=sys.stderr)


def _command(name: str) -> Command:
    known: dict[str, Command] = {}
    for package in plugins.PACKAGES[1:]:
        for found in plugins.plugins(package, "COMMANDS").values():
            known |= found
    from dse.commands import COMMANDS

    known |= COMMANDS
    if name not in known:
        raise ConfigError([Problem(name, "is no command", way_out=did_you_mean(name, known))])
    return known[name]


def _needs_hydra(words: Sequence[str]) -> bool:
    """Hydra's own flags go to Hydra. Raises ConfigError for flags that would read other configurations, or pickles."""
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    wrong = [flag for flag in flags if flag not in (*OWN_FLAGS, *_HYDRA_FLAGS)]
    if wrong:
        way = did_you_mean(wrong[0], (*OWN_FLAGS, *_HYDRA_FLAGS))
        raise ConfigError([Problem(wrong[0], "is no flag that is understood here", way_out=way)])
    _check_flags(flags)
    return any(flag not in OWN_FLAGS for flag in flags)


def _check_flags(flags: Sequence[str]) -> None:
    """Refuse combinations that Hydra answers with a traceback. Raises ConfigError."""
    asked = [_LONG.get(flag, flag) for flag in flags]
    ways = list(dict.fromkeys(flag for flag in asked if flag in _WAYS))
    check = Problems()
    if len(ways) > 1:
        check.add(" ".join(ways), "ask for several things at once", way_out=f"keep one of {', '.join(_WAYS)}")
    for flag in ("--resolve", "--package"):
        if flag in asked and "--cfg" not in asked:
            check.add(flag, "only says how --cfg prints a configuration", way_out=f"write --cfg job {flag}")
    check.done()


_LONG = {
    **{"-c": "--cfg", "-p": "--package", "-r": "--run", "-m": "--multirun", "-i": "--info"},
    "-sc": "--shell-completion",
}
_WAYS = ("--run", "--multirun", "--cfg", "--info", "--shell-completion")


_HYDRA_FLAGS = (
    *("--cfg", "-c", "--resolve", "--package", "-p", "--run", "-r", "--multirun", "-m", "--info", "-i"),
    *("--hydra-help", "--version", "--shell-completion", "-sc"),
)


def _hydra(words: Sequence[str]) -> int:
    """`--cfg`, `--info`, `--multirun`, ... as Hydra does them; each multirun job is a study."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    check_foreign(words, own_folder(words))
    if "--resolve" in words:
        check_expansion(
            [_quoted(word) for word in overrides(words) if "=" in word or word.startswith("~")], own_folder(words)
        )
    codes = [OK]

    def job(_: object) -> None:
        from dse.commands import run

        typed = list(HydraConfig.get().overrides.task)
        codes.append(_exit_code(lambda: run(request(typed, own_folder(words)))))

    ordered = sorted(words, key=lambda word: "=" in word and not word.startswith("-"))  # argparse wants flags first
    sys.argv = [sys.argv[0], *(_quoted(word) for word in ordered)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra prints what it raises, and exits with 1
    with told_by_hydra():
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(job)()
    return max(codes)


def _quoted(word: str) -> str:
    """A sweep given to the space is text to Hydra, or it would take it for a sweep of its own."""
    key, equals, value = word.partition("=")
    if key.lstrip("+").startswith("space.") and "(" in value:
        escaped = value.replace("'", "\\'")
        return f"++{key.lstrip('+')}{equals}'{escaped}'"
    return word


def _help(folder: Path | None) -> str:
    lines = [
        "usage: python -m dse study=<name> [group=option ...] [path=value ...] [+space.path='range(a,b,step)' ...]",
        "       python -m dse <command> [...]",
        "",
    ]
    for group, title in _GROUPS.items():
        lines += [f"{title} ({group}=)", *_listed(listing(group, [folder] if folder else [])), ""]
    return "\n".join([*lines, _FOOT])


def _listed(options: dict[str, str]) -> list[str]:
    width = max((len(name) for name in options), default=0)
    return [f"  {name:<{width}}  {text}" for name, text in options.items()]


_GROUPS = {
    "study": "Studies",
    "simulator": "Simulators",
    "search": "Searches",
    "schedule": "Schedules",
    "system": "Systems",
    "pim": "Units in a system's memory",
    "workload": "Workloads",
    "model": "Models",
    "kernels": "Kernels of a framework",
    "optimizer": "Optimizers",
    "setting": "Settings of a GPU",
    "application": "Applications as memory traces",
    "policy": "Cache policies",
    "lengths": "Sequence lengths of an epoch",
    "iterations": "Iterations that stand for an epoch",
    "quantised": "Low-precision copies of weights",
    "format": "Formats of copies",
    "instructions": "Instruction sets of units in memory",
    "fidelity": "Ladders of models",
    "store": "Stores",
    "tracking": "Tracking",
}
_FOOT = """\
Commands
  dry-run study=<name> [...]     what a study would evaluate, how long that takes and how much disk [json=true]
  report study=<name>            redraw figures and claims of the newest run from what is stored
  timeline study=<name> key=...  run one stored point again: its timeline as a picture and as a trace
  sync [study=<name>] [uri=...]  write into MLflow (or optuna=<storage>) what it lacks of the finished runs
  check                          look at every recorded result: is it as it was written?
  importance study=<name>        which knobs matter, for each objective [method=ped_anova|fanova]
  rules study=<name>             learn which option is best when, and judge it on what it has not seen
  robustness study=<name>        does the answer hold with other constants, where does the winner flip [vary=<path>=0.1]
  compare <run> <run>            two finished runs side by side: <study>, <study>/<time> or a folder
  calibrate system=<name or YAML> data=<csv> out=<folder>
                                 fit a GPU's efficiency constants on a few measured operators, test them on the rest
  seqpoint data=<csv> [k0=5] [error=0.01] [out=<csv>]
                                 which iterations of a log over sequence lengths to profile, and what they project
  trace data=<file> [system=gem5_gcn3] [policy=combined] [out=<folder>]
                                 a memory trace of your own (Parquet, CSV, Accel-Sim) through caches and DRAM
  ui [port=5000]                 serve the MLflow UI on 127.0.0.1

Examples
  python -m dse study=ficco_sweep simulator=event search=nsga2 budget.trials=400
  python -m dse study=ficco_sweep system.gpu.num_cus=228 workload.shapes=my.csv
  python -m dse study=ficco_sweep +space.system.gpu.num_cus='range(64,304,16)'

Flags: --cfg job prints the composed configuration, --config-dir adds a folder of your own configurations,
--multirun runs several, --hydra-help lists the rest."""
