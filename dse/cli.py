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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dse import plugins
from dse.config.compose import check_expansion, check_foreign, request, told_by_hydra
from dse.config.flags import OWN_FLAGS, VERBOSE, overrides, own_folder
from dse.config.options import conf_dir, list_options
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
    if words[0] in VERBOSE:
        words = [*words[1:], words[0]]
    if "=" not in words[0] and not words[0].startswith(("-", "+", "~")):
        return _command(words[0], words[1:])(words[1:])
    if _needs_hydra(words):
        return _hydra(words)
    from dse.run_study import run

    return run(request(overrides(words), own_folder(words)))


def _refuse(error: ConfigError) -> None:
    count = len(error.problems)
    print(f"refused, nothing was evaluated: {count} problem{'s' if count > 1 else ''}", file=sys.stderr)
    for problem in error.problems:
        print(f"  {problem}", file=sys.stderr)


def _command(name: str, rest: Sequence[str]) -> Command:
    """A command by name. Raises ConfigError where there is none."""
    if not plugins.target("command", name):
        raise ConfigError([Problem(name, "is no command", way_out=_instead_of(name, rest))])
    command: Command = plugins.load("command", name)
    return command


def _instead_of(name: str, rest: Sequence[str]) -> str:
    """What somebody may have meant by a word that is no command: an option of a group, or a group and its option."""
    groups = plugins.declarations("GROUPS")
    if name in groups:
        options = list_options(name)
        return f"write {name}={rest[0] if rest and rest[0] in options else f'<one of {len(options)}, see --help>'}"
    for group in sorted(groups, key=lambda group: _FIRST.index(group) if group in _FIRST else len(_FIRST)):
        if name in list_options(group):
            return f"write {group}={name}" if group == "study" else f"write study=<name> {group}={name}"
    near = did_you_mean(name, [*plugins.names("command"), *list_options("study")])
    for study in list_options("study"):
        near = near.replace(f"did you mean `{study}`", f"did you mean `study={study}`")
    return (
        near if near.startswith("did") else f"{did_you_mean(name, plugins.names('command'))}; a study is study=<name>"
    )


def _needs_hydra(words: Sequence[str]) -> bool:
    """Hydra's own flags go to Hydra. Raises ConfigError for flags that would read other configurations, or pickles."""
    flags = [word.partition("=")[0] for word in words if word.startswith("-") and word not in VERBOSE]
    wrong = [flag for flag in flags if flag not in (*OWN_FLAGS, *_HYDRA_FLAGS)]
    if wrong:
        group = wrong[0].lstrip("-")
        is_group = group in plugins.declarations("GROUPS")
        way = f"write {group}=<name>" if is_group else did_you_mean(wrong[0], (*OWN_FLAGS, *_HYDRA_FLAGS))
        raise ConfigError([Problem(wrong[0], "is no flag that is understood here", way_out=way)])
    _check_flags(flags)
    return any(flag not in OWN_FLAGS for flag in flags)


def _check_flags(flags: Sequence[str]) -> None:
    """Refuse combinations that Hydra answers with a traceback. Raises ConfigError."""
    long_flags = [_LONG.get(flag, flag) for flag in flags]
    ways = list(dict.fromkeys(flag for flag in long_flags if flag in _WAYS))
    check = Problems()
    if len(ways) > 1:
        check.add(" ".join(ways), "ask for several things at once", way_out=f"keep one of {', '.join(_WAYS)}")
    for flag in ("--resolve", "--package"):
        if flag in long_flags and "--cfg" not in long_flags:
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
            [_quote_sweep(word) for word in overrides(words) if "=" in word or word.startswith("~")], own_folder(words)
        )
    codes = [OK]

    def job(_: object) -> None:
        from dse.run_study import run

        typed = list(HydraConfig.get().overrides.task)
        codes.append(_exit_code(lambda: run(request(typed, own_folder(words)))))

    ordered = sorted(words, key=lambda word: "=" in word and not word.startswith("-"))  # argparse wants flags first
    sys.argv = [sys.argv[0], *(_quote_sweep(word) for word in ordered)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra prints what it raises, and exits with 1
    with told_by_hydra():
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(job)()
    return max(codes)


def _quote_sweep(word: str) -> str:
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
    titles = plugins.declarations("GROUPS")
    for group in sorted(titles, key=lambda group: _FIRST.index(group) if group in _FIRST else len(_FIRST)):
        lines += [f"{titles[group]} ({group}=)", *_table_lines(list_options(group, [folder] if folder else [])), ""]
    commands = {command.usage: command.description for command in plugins.declarations("COMMANDS").values()}
    return "\n".join([*lines, "Commands", *_table_lines(commands), "", _FOOT])


def _table_lines(options: Mapping[str, str]) -> list[str]:
    """Names with their descriptions, these in one column; a name that is too long for that has a line of its own."""
    width = max((len(name) for name in options if len(name) <= _COLUMN), default=0)
    lines = []
    for name, text in options.items():
        lines += [f"  {name:<{width}}  {text}"] if len(name) <= width else [f"  {name}", f"  {'':<{width}}  {text}"]
    return lines


_FIRST = ("study", "simulator", "search", "schedule", "system", "workload")  # groups that are listed before others
_COLUMN = 30  # characters of a name before its description
_FOOT = """\
Examples
  python -m dse study=ficco_sweep simulator=event search=nsga2 budget.trials=400
  python -m dse study=ficco_sweep system.gpu.num_cus=228 workload.shapes=my.csv
  python -m dse study=ficco_sweep +space.system.gpu.num_cus='range(64,304,16)'

Flags: --cfg job prints the composed configuration, --config-dir adds a folder of your own configurations,
--multirun runs several, -v prints every table, --hydra-help lists the rest."""
