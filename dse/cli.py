"""The command line: `python -m dse run <study> [group=option ...] [path=value ...]`, and the other verbs.

A command is a verb (`plan`), or a verb and a word (`results compare`); `run <study>` is short for `study=<study>`.

Exit codes: 0 done; 2 configuration refused, nothing evaluated; 3 too many points failed; 4 the environment failed
(disk, database, permissions), what was recorded is kept; 130 interrupted, 129 its terminal is gone,
143 terminated; 141 nobody reads the output.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dse import __version__, plugins
from dse.config.options import (
    DRY_RUN,
    OWN_FLAGS,
    SEVERAL,
    VERBOSE,
    conf_dir,
    list_options,
    overrides,
    own_folder,
    own_options,
    search_path,
    without_own_folder,
)
from dse.errors import Broken, ConfigError, Problems, environment_text
from dse.errors.texts import CLOSED_PIPE, ClosedPipe, Masks, printable, printable_streams, secrets_known

if TYPE_CHECKING:
    from dse.study.plan import Plan

OK, REFUSED, FAILED_POINTS, ENVIRONMENT, INTERRUPTED = 0, 2, 3, 4, 130
Command = Callable[[Sequence[str]], Any]
_GARBAGE = (50_000, 20, 20)  # for each 700 objects, imports alone would be searched hundreds of times, for nothing


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Nothing that a user can cause ends in a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    atexit.register(gc.freeze)  # or the interpreter spends a second at its end on looking for garbage
    gc.set_threshold(*_GARBAGE)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no µ is no reason to fail
    try:
        with secrets_known(words), printable_streams(), plugins.safe_imports():
            try:
                return _exit_code(_dispatch, words)
            except KeyboardInterrupt as error:
                print(str(error) or "interrupted", file=sys.stderr)
                return 128 + getattr(error, "number", INTERRUPTED - 128)
            except Exception:
                if threading.current_thread() is threading.main_thread():
                    sys.excepthook = _fault(traceback.format_exc())
                raise
    except ClosedPipe:
        return CLOSED_PIPE


def _fault(text: str) -> Callable[..., None]:
    """A hook for the traceback of a fault of ours, which is shown without the passwords that are known by now."""
    shown = printable(text)

    def show(*_: object) -> None:
        print(shown, file=sys.stderr)

    return show


def _exit_code(command: Callable[..., int], *arguments: Any) -> int:
    """Run a command; its exit code, also where it is refused or fails, which is told.

    Raises KeyboardInterrupt: the command was interrupted, also where a library's clean-up made another error of it.
    """
    try:
        try:
            return command(*arguments)
        except Exception as error:
            if interrupt := _interrupt_behind(error):
                raise interrupt from None
            raise
    except ConfigError as error:
        _refuse(error)
        return REFUSED
    except Broken as error:
        print(error, file=sys.stderr)
        return FAILED_POINTS
    except OSError as error:
        print(f"the environment failed: {environment_text(error)}", file=sys.stderr)
        return ENVIRONMENT


def _interrupt_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interrupt in whose handling an error arose: `finally` of a half-built object raises errors of its own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


def _information(words: list[str]) -> str:
    """The help or the version, where words ask for one."""
    if not words or words[0] == "help" or {"--help", "-h"} & set(words):
        from dse.shell.help import help_text
        from dse.shell.study_help import named_study, study_text

        folder = own_folder(words)
        study = "" if "--all" in words else named_study(words, folder)
        return study_text(study, folder) if study else help_text(words, folder)
    return f"dse {__version__}" if words[0] in ("--version", "version") else ""


def _dispatch(words: list[str]) -> int:
    if text := _information(words):
        print(text)
        return OK
    if words[0] in (*VERBOSE, *SEVERAL):
        words = [*words[1:], words[0]]
    only_counts, words = DRY_RUN in words, [word for word in words if word != DRY_RUN]
    if words in ([], ["run"]):
        words = ["studies"]
    if words[0] == "run" and plugins.command_of_study(words[1]):
        words = words[1:]
    if _asks_for_several(words):
        return _count_each(words) if only_counts else _run_each(words)
    if only_counts:
        return _dry_run(words)
    if words[0] != "run" and "=" not in words[0] and not words[0].startswith(("-", "+", "~")):
        return _run_command(words)
    words = _named_study(words)
    if _needs_hydra(words):
        return _hydra(words)
    planned = _planned(overrides(words), own_folder(words))
    from dse.run_study import run

    return run(planned)[1]


def _planned(texts: Sequence[str], folder: Path | None) -> Plan:
    """The plan of the study of some overrides. own: a folder of configuration.

    Raises ConfigError: a refusal waits for no import of what it does not need, words before values.
    """
    from dse.config.compose import request

    composed = request(texts, folder)
    composed.check()
    from dse.study.plan import plan

    return plan(composed)


def _run(texts: Sequence[str], folder: Path | None) -> tuple[Path, int]:
    """Run the study of some overrides; its folder, and its exit code. own: a folder of configuration."""
    planned = _planned(texts, folder)
    from dse.run_study import run

    return run(planned)


def _asks_for_several(words: Sequence[str]) -> bool:
    """Tell whether a command line runs a study several times: by `-m`, or by `system=[h100_8,h200_8]`."""
    lists = [word for word in words if re.match(r"[a-z_]+=\[", word)]
    has_flag = bool(set(words) & set(SEVERAL))
    if not lists and not has_flag:
        return False
    if words[0] != "run" and "=" not in words[0] and not plugins.command_of_study(words[0]):
        return False
    from dse.config.expansion import names_several

    return has_flag or any(names_several(word, plugins.declarations("GROUPS")) for word in lists)


def _jobs(words: Sequence[str]) -> list[tuple[Mapping[str, str], list[str]]]:
    """The values that differ, and the words, of each study that a command line asks for. Raises ConfigError."""
    from dse.config.compose import check_foreign
    from dse.config.expansion import check_options, each_run

    name = plugins.command_of_study(words[0])
    typed = list(words[1:]) if name else _named_study(words)
    _needs_hydra([*typed, "--multirun"])  # refuses flags that do not go together
    check_foreign(typed, own_folder(typed))
    jobs = each_run([word for word in typed if word not in SEVERAL], plugins.declarations("GROUPS"))
    check_options([values for values, _ in jobs], plugins.declarations("GROUPS"), own_folder(typed))
    return [(values, [*filter(None, [name]), *job]) for values, job in jobs]


def _run_each(words: Sequence[str]) -> int:
    """Run a study for each combination of several values, and print one table of all; the most serious exit code."""
    jobs = _jobs(words)
    from dse.run_study import SeveralRuns

    runs, codes = SeveralRuns(verbose=bool({*VERBOSE, "verbose=true"} & set(words))), [OK]
    for values, job in jobs:
        codes.append(_exit_code(runs.run, values, partial(_run_one, job)))
    runs.show()
    return max(codes)


def _count_each(words: Sequence[str]) -> int:
    """Print what each study of several would evaluate; the most serious exit code."""
    codes = [OK]
    for values, job in _jobs(words):
        print(" ".join(f"{path}={value}" for path, value in values.items()))
        codes.append(_exit_code(_dry_run, job))
    return max(codes)


def _dry_run(words: Sequence[str]) -> int:
    """Print what a study would evaluate: a command's own words count as they do where it runs. Raises ConfigError."""
    from dse.run_study import dry_run

    command = plugins.declaration("COMMANDS", words[0]) if "=" not in words[0] else None
    if command is None or not command.study:
        return dry_run(_named_study(words))
    return dry_run(words[1:], plugins.load("command", words[0]))


def _run_one(words: Sequence[str]) -> tuple[Path, int]:
    """Run a study by its command, if it has one; its folder, and its exit code."""
    if not plugins.command_of_study(words[0]):
        return _run(overrides(words), own_folder(words))
    answer = plugins.load("command", words[0])(words[1:])
    return answer.folder, answer.code


def _named_study(words: Sequence[str]) -> list[str]:
    """The words of a study, in which `run <study>`, or a command that runs one, is `study=<study>`."""
    if words[:1] == ["run"]:
        arguments = words[1:]
        return [
            word if "=" in word or word.startswith("-") or n else f"study={word}" for n, word in enumerate(arguments)
        ]
    command = plugins.declaration("COMMANDS", words[0]) if words and "=" not in words[0] else None
    return [f"study={command.study}", *words[1:]] if command is not None and command.study else list(words)


def _refuse(error: ConfigError) -> None:
    count = len(error.problems)
    print(f"refused, nothing was evaluated: {count} problem{'s' if count > 1 else ''}", file=sys.stderr)
    for problem in error.problems:
        print(f"  {problem}", file=sys.stderr)


def _run_command(words: Sequence[str]) -> int:
    """Run the command that the first words name, or show the commands of a verb. Raises ConfigError for other words."""
    for count in (2, 1):
        name = " ".join(words[:count])
        if plugins.target("command", name):
            return _run_named(name, words[count:])
    from dse.shell.help import commands_of, help_text, list_text

    is_verb = len(words) == 1 and commands_of(words[0])
    text = help_text(words, None) if is_verb else list_text(words[0], words[1:], own_folder(words))
    if not text:
        from dse.shell.mistakes import problem_of_no_command

        raise ConfigError([problem_of_no_command(words)])
    print(text)
    return OK


def _run_named(name: str, words: Sequence[str]) -> int:
    """Run a command. Names that it looks up may be of the folder of `--config-dir`, or `config_dir=`."""
    command, declared = plugins.load("command", name), plugins.declaration("COMMANDS", name)
    if declared is not None and declared.study:  # it composes a study, which has the flag itself
        if _needs_hydra(words):
            return _hydra(_named_study([name, *words]))
        answer = command(words)
    else:
        knows = declared is not None and "config_dir" in declared.options
        words = [re.sub("^config_dir=", f"{OWN_FLAGS[0]}=", word) for word in words]
        folder = own_folder(words)
        with own_options(folder):
            answer = command([*without_own_folder(words), *([f"config_dir={folder}"] if knows and folder else [])])
    return answer if isinstance(answer, int) else int(answer.show())


def _needs_hydra(words: Sequence[str]) -> bool:
    """Hydra's own flags go to Hydra. Raises ConfigError for flags that would read other configurations, or pickles."""
    typed = [word for word in words if word.startswith("-") and word not in VERBOSE]
    flags = [word.partition("=")[0] for word in typed]
    known = (*OWN_FLAGS, *_HYDRA_FLAGS)
    wrong = [word for word in typed if word.partition("=")[0] not in known]
    if wrong:
        from dse.config.spelling import flag_problem

        options = {group: list(list_options(group)) for group in plugins.declarations("GROUPS")}
        raise ConfigError([flag_problem(word, options, (DRY_RUN, *VERBOSE, *known)) for word in wrong])
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
            check.add(flag, "only changes how --cfg prints a configuration", way_out=f"write --cfg job {flag}")
    check.done()


_LONG = {
    **{"-c": "--cfg", "-p": "--package", "-r": "--run", "-m": "--multirun", "-i": "--info"},
    "-sc": "--shell-completion",
}
_WAYS = ("--run", "--multirun", "--cfg", "--info", "--shell-completion")


_HYDRA_FLAGS = (
    *("--cfg", "-c", "--resolve", "--package", "-p", "--run", "-r", "--multirun", "-m", "--info", "-i"),
    *("--hydra-help", "--shell-completion", "-sc"),
)


def _hydra(words: Sequence[str]) -> int:
    """`--cfg`, `--info`, `--multirun`, ... as Hydra does them; each multirun job is a study."""
    import hydra
    import yaml
    from hydra.core.hydra_config import HydraConfig

    from dse.config.compose import check_expansion, check_foreign, hydra_errors, request

    check_foreign(words, own_folder(words))
    masks, flags = Masks(), {word.partition("=")[0] for word in words}
    of_job = {"job", "--cfg=job", "-c=job"} & set(words) and {"--cfg", "-c"} & flags
    if of_job and not {"--package", "-p"} & flags:  # Hydra does not know options that stand in lists
        composed = request([masks.put_on(word) for word in overrides(words) if word != "job"], own_folder(words))
        composed.check()
        print(yaml.safe_dump(composed.tree, sort_keys=False, allow_unicode=True), end="")
        return OK
    if "--resolve" in words:
        check_expansion(
            [_quote_sweep(word) for word in overrides(words) if "=" in word or word.startswith("~")], own_folder(words)
        )
    codes = [OK]

    def job(_: object) -> None:
        typed = [masks.lifted(text) for text in HydraConfig.get().overrides.task]
        codes.append(_exit_code(lambda: _run(typed, own_folder(words))[1]))

    ordered = sorted(words, key=lambda word: "=" in word and not word.startswith("-"))  # argparse wants flags first
    os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra prints what it raises, and exits with 1
    # Hydra copies the configuration to the folder of its sweeps, passwords and all.
    with tempfile.TemporaryDirectory(prefix="dse-hydra-") as scratch, hydra_errors():
        place = [f"hydra.sweep.dir='{scratch}'", *search_path(plugins.configurations())]
        sys.argv = [sys.argv[0], *(masks.put_on(_quote_sweep(word)) for word in ordered), *place]
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(job)()
    return max(codes)


def _quote_sweep(word: str) -> str:
    """A sweep given to the space is text to Hydra, or it would take it for a sweep of its own."""
    key, equals, value = word.partition("=")
    if key.lstrip("+").startswith("space.") and "(" in value:
        escaped = value.replace("'", "\\'")
        return f"++{key.lstrip('+')}{equals}'{escaped}'"
    return word
