"""`profile twin <profile> system=<machine>`: a machine, and a stack, with constants fitted to a profile.

Written into the folder, which every command takes as `--config-dir <folder>`:

    system/twin.yaml     the shipped machine with the fitted constants, each with its source
    stack/twin.yaml      with kernels/twin.yaml the software with its host time, where that was fitted and a stack named
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import TypeAdapter

from dse.config.options import list_options, load_yaml, option_file
from dse.config.variants import load_option
from dse.errors import ConfigError, Problem, did_you_mean, pairs
from dse.files import atomic_replacement
from dse.results.run_folder import writable
from dse.values.units import Seconds
from dse_traces.commands.lines import unused_patterns
from dse_traces.commands.several_ranks import read_files
from dse_traces.laws.twin import HOST, FittedConstant, Twin, fit_twin
from dse_traces.laws.twin_fit import twin_rules
from dse_traces.profile.kernel_classes import OPTION, read_patterns
from dse_traces.profile.kernels import Profile, classify
from dse_traces.profile.ranks import Ranks, match
from dse_traces.readers.formats import files_of
from simulators.hardware.machine import tree_of

if TYPE_CHECKING:
    from rich.table import Table

NAME = "twin"
"""Name of the written system, stack and kernels."""
NOTHING_FITTED = 3
"""Exit code where no constant is identifiable."""


def profile_twin(words: Sequence[str]) -> int:
    """`profile twin <profile> system=<machine> [stack=] [model=] [kernels=] [out=]`: fit and write a machine.

    Returns 0, or 3 where nothing can be fitted. Raises ConfigError.
    """
    from dse.results import report

    typed = [word if "=" in word or place else f"profile={word}" for place, word in enumerate(words)]
    options = pairs(typed, {"profile": "", "system": ""}, optional=["out", "model", "stack", OPTION])
    for group in ("system", "stack", "model"):
        _check_option(group, options.get(group))
    tree, host_s = tree_of(options["system"]), _shipped_host_s(options.get("stack"))
    patterns = read_patterns(options.get(OPTION, ""))
    paths = files_of(options["profile"])
    profiles, unread = read_files(paths)
    profiles = [classify(profile, patterns) for profile in profiles]
    ranks = match(profiles) if profiles[1:] else None
    profiles = list(ranks.profiles.values()) if ranks else profiles
    twin = fit_twin(tree, profiles, ranks, host_s)
    console, source = report.console(), _source(profiles)
    lines = [*_recognised(twin, profiles, ranks), *(f"dropped: a file that cannot be read: {text}" for text in unread)]
    for line in (*lines, *_mismatch(profiles, tree), *answer(twin), *unused_patterns(profiles, patterns)):
        console.print(line, soft_wrap=True, highlight=False)
    if "stack" not in options and any(of.path == HOST for of in twin.fitted):
        console.print("the host's time of a launch is a stack's: add stack=<nearest stack> to write it", soft_wrap=True)
    if not _writes(twin, options.get("stack")):
        console.print("nothing is written: no constant of a machine can be fitted to it (exit code 3)", soft_wrap=True)
        return NOTHING_FITTED
    folder = writable(options.get("out", NAME)).folder
    files = write_twin(twin, folder, options, source)
    console.print(f"written to {folder}/: {', '.join(files)}", soft_wrap=True, highlight=False)
    console.print(_next_command(folder, files, options.get("model")), soft_wrap=True, highlight=False)
    return 0


def _check_option(group: str, name: str | None) -> None:
    """Refuse a name that no file of a group has. Raises ConfigError."""
    # a path of a file has no name that `defaults` of the twin could hold
    if name is not None and name not in list_options(group):
        way = did_you_mean(name, list_options(group))
        raise ConfigError([Problem(group, f"is no option of {group}", name, way)])


def _kernels_of(stack: str) -> str:
    """Name of the kernels of a stack."""
    path = option_file("stack", stack)
    assert path is not None  # checked
    return str(load_yaml(path)["stack"]["kernels"])


def _shipped_host_s(stack: str | None) -> float | None:
    """Shipped time of the host for a launch by a stack; None where it has none."""
    path = None if stack is None else option_file("kernels", _kernels_of(stack))
    value = None if path is None else load_option(path).get("host_launch_s")
    return None if value is None else float(TypeAdapter(Seconds).validate_python(value))


def _source(profiles: Sequence[Profile]) -> str:
    names = list(dict.fromkeys(profile.source for profile in profiles))
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return f"the profile {names[0]}{more}"


def _recognised(twin: Twin, profiles: Sequence[Profile], ranks: Ranks | None) -> Iterator[str]:
    """Yield what was recognised, the most important first."""
    first = profiles[0]
    count = f"{len(profiles)} ranks" if profiles[1:] else "1 rank"
    iterations = f"{len(first.iterations)} iterations" if first.iterations else "iterations not marked"
    kernels = sum(map(len, profiles))
    lost = f"; lost: {first.lost}" if first.lost else ""
    yield f"{_source(profiles)}: {first.device or 'GPU not named'}, {count}, {iterations}, {kernels:,} kernels{lost}"
    for line in twin.recognised:
        yield f"  {line}"
    if ranks is None:
        yield "  one rank: waiting for late ranks is not recorded, so intervals of collectives hold it"
    elif ranks.assumed:
        yield f"  {ranks.assumed}"


def _mismatch(profiles: Sequence[Profile], tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield that a profile names another GPU than the machine has."""
    device = "".join(filter(str.isalnum, profiles[0].device.lower()))
    gpu = str(tree["gpu"].get("name", "")).partition("_")[0]
    if device and gpu and gpu not in device:
        yield f"the profile names {profiles[0].device}, and the system has {gpu}: name the nearest system"


def answer(twin: Twin) -> Iterator[Table | str]:
    """Yield the table of constants, and what could not be fitted."""
    from rich.table import Table

    if twin.fitted:
        share = f"{100 * twin_rules().coverage:.0f} %"
        table = Table(box=None, pad_edge=False)
        for column in ("constant", "path"):
            table.add_column(column, overflow="fold")
        for column in ("shipped", "fitted", share, "spread", "from"):
            table.add_column(column, justify="right")
        for of in twin.fitted:
            shipped = "–" if of.shipped is None else f"{of.shipped:.4g}"
            interval, spread = f"{of.low:.4g} to {of.high:.4g}", f"{100 * of.error:.1f} %"
            kernels = f"{of.kernels:,} kernels, {of.rows:,} rows"
            table.add_row(of.name, of.path, shipped, f"{of.value:.4g}", interval, spread, kernels)
        yield table
    for kept in twin.kept:
        yield f"not fitted, as shipped: {kept.name}: {kept.reason}; {kept.way_out}"


def _writes(twin: Twin, stack: str | None) -> bool:
    """Tell whether a constant was fitted that has a file."""
    return any(of.path != HOST or stack is not None for of in twin.fitted)


def write_twin(twin: Twin, folder: Path, options: Mapping[str, str], source: str) -> list[str]:
    """Write the files of a twin into a folder; returns their paths in it. options: system, and perhaps stack."""
    base, stack = options["system"], options.get("stack")
    machine = [of for of in twin.fitted if of.path != HOST]
    host = next((of for of in twin.fitted if of.path == HOST), None)
    trees: dict[str, tuple[str, dict[str, Any]]] = {f"system/{NAME}.yaml": ("", _system(base, machine, source))}
    if host is not None and stack is not None:
        trees |= _stack(stack, host, source)
    for name, (head, tree) in trees.items():
        path = writable(str(folder / Path(name).parent)).folder / Path(name).name
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
        with atomic_replacement(path) as fresh:
            fresh.write_text(head + text, encoding="utf-8")
    return list(trees)


def _system(base: str, fitted: Sequence[FittedConstant], source: str) -> dict[str, Any]:
    """Tree of the machine: the shipped one, with the fitted constants over it."""
    tree: dict[str, Any] = {
        "defaults": [base, "_self_"],
        "name": NAME,
        "description": f"{base} with constants fitted to {source}",
    }
    sources = dict[str, Any]()
    for of in fitted:
        for path, value in of.values.items():
            below, names = tree, path.split(".")
            for name in names[:-1]:
                below = below.setdefault(name, {})
            below[names[-1]] = float(f"{value:.5g}")
            sources[path] = _source_of(of, source)
    return {**tree, "sources": sources}


def _source_of(of: FittedConstant, source: str) -> dict[str, str]:
    low, high = of.low / of.value, of.high / of.value
    share = f"{100 * twin_rules().coverage:.0f} % interval {low:.3f} to {high:.3f} of it"
    return {"provenance": "measured", "source": f"{source}, {of.kernels} kernels, {of.name}: {share}"}


def _stack(stack: str, host: FittedConstant, source: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Files of a stack and its kernels, with the host's time of a launch."""
    path, kernels = option_file("stack", stack), _kernels_of(stack)
    assert path is not None  # checked
    shipped = load_yaml(path)
    description = f"{stack} with the host's time of a launch in {source}"
    labels = {"name": NAME, "description": description, "kernels": NAME, "fitted_on": source}
    tree = {**shipped, "defaults": [{"override /kernels": NAME}], "stack": {**shipped["stack"], **labels}}
    variant = {
        "name": NAME,
        "description": description,
        "variant_of": kernels,
        "host_launch_s": float(f"{host.value:.5g}"),
        "sources": {"host_launch_s": _source_of(host, source)},
    }
    return {f"stack/{NAME}.yaml": ("# @package _global_\n", tree), f"kernels/{NAME}.yaml": ("", variant)}


def _next_command(folder: Path, files: Sequence[str], model: str | None) -> str:
    """The command that plans with the twin."""
    stack = f" stack={NAME}" if f"stack/{NAME}.yaml" in files else ""
    return f"plan with it: python -m dse plan model={model or '<model>'} system={NAME}{stack} --config-dir {folder}"
