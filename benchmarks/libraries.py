"""Software of collectives against public tables: `python -m benchmarks.libraries [--data DIR] [--json]`.

With a folder of measured tables, all rows are judged that no constant was fitted on:

    implementation_median   median relative error of the times of libraries, from 256 KiB on; also by software, and by
                            software of its own kernels (all but NCCL's rings)
    fastest_right           share of the groups of a source, number of GPUs and size with two pieces of software or more
                            in which the one that was measured to be the fastest is the fastest by us; also from 256 KiB
                            on alone, and as the time that our choice was measured to lose
    xla_collectives_median  median relative error of XLA's tables, from 64 KiB on (MI300X: from 64 MiB, less its floor);
                            also by GPU

    gemm_with_collective_median  median relative error of whole operations, serial and overlapped, by implementations of
                            overlap; `sign`: share of those in which overlap pays, or loses, by us as measured
    ratio_p90               90th percentile of the absolute logarithm by which the time of software over that of the
                            library is off, of groups that hold both (`conf/data/collective_software.yaml`)
    moe_dispatch_median     median relative error of exchanges of experts over EFA, of the kernels that have constants

Without one, the models alone:

    per_site_faster         share of steps with split weights whose best numbers of CTAs over tp and over dp, each its
                            own, beat the best single number for both (`benchmarks.sites`); `largest_gain_per_site`: by
                            how much at most; `_in_simgrid`: by SimGrid's sharing of SMs, where it is there
    files_read_back         kinds of files for libraries that are written, and read back as what was planned

    unequal_costs           questions (machine, pattern, software) to which two doors answer differently
    monotone_breaks         larger payloads, more GPUs that send no less at a switch, or slower links, in less time; or
                            more bytes than links carry, a quarter of a machine's among them
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.expert_exchanges import errors_of
from benchmarks.sites import per_site
from dse.config.options import list_options
from dse.values import put
from dse_calibration.overlap_measured.paired_tables import predict_pairs
from dse_deploy.read_back import count_read_back
from simulators.costs.algorithms import Pattern
from simulators.costs.collective import collective_cost, collective_seconds, machine_ring
from simulators.costs.collective_paths import path_of
from simulators.costs.collective_software import Call, Question, all_software, refusal
from simulators.costs.transfer import TransferMode, alone, is_measured, library_cus
from simulators.hardware.machine import System, tree_of
from simulators.hardware.network import Pattern as LinkPattern
from simulators.hardware.network import links
from simulators.steps.operators.work import Exchange, collective
from validation.left_out import given_folder
from validation.library_rows import EXCHANGES, FROM_BYTES, GEMMS, XLA_GPUS, LibraryRow, counts, read_libraries, read_xla

_LIBRARIES = ("nccl", "rccl")
SIZES = 2.0 ** np.arange(10, 31)
_NEAR = 1e-12
_LINKS = (0.25, 1.0, 1.25, 2.0)
"""Rates of links over those of a machine, from links that bound all software on."""
_MOST_GPUS = 16
_NEAR_FASTEST = 1e-9  # of measured times that are the same as printed


def names() -> list[str]:
    """Names of all software, one for each format."""
    return [name for software in all_software() for name in software.names]


# ---------------------------------------------------------------- measured rows


def median(rows: Iterable[LibraryRow]) -> float | None:
    """Median relative error; None without rows."""
    errors = [abs(row.error) for row in rows]
    return float(np.median(errors)) if errors else None


def judged(rows: Iterable[LibraryRow]) -> list[LibraryRow]:
    """Rows of software that is known, that are long enough, and that nothing was fitted on."""
    return [row for row in rows if row.call is not None and counts(row) and not row.is_fitted()]


def by_software(rows: Sequence[LibraryRow]) -> dict[str, Any]:
    """Count and median error of rows by software."""
    groups: dict[str, list[LibraryRow]] = {}
    for row in rows:
        assert row.call is not None
        groups.setdefault(row.call.name, []).append(row)
    return {name: {"rows": len(members), "median": median(members)} for name, members in sorted(groups.items())}


def choices(rows: Iterable[LibraryRow]) -> Iterator[tuple[float, bool, float]]:
    """Yield size, whether the fastest by us was measured to be, and its measured time over the least, of each group.

    Groups with a row that a constant was fitted on are left out.
    """
    for (*_, size), members in _groups(rows).items():
        if len({row.label for row in members}) > 1 and not any(row.is_fitted() for row in members):
            chosen, least = min(members, key=lambda row: row.predicted_s), min(row.seconds for row in members)
            loss = chosen.seconds / least - 1
            yield size, loss <= _NEAR_FASTEST, loss


def _groups(rows: Iterable[LibraryRow]) -> dict[tuple[Any, ...], list[LibraryRow]]:
    """Rows of known software by source, collective, machine, number of GPUs and size."""
    groups: dict[tuple[Any, ...], list[LibraryRow]] = {}
    for row in rows:
        if row.call is not None:
            key = row.cells["source"], row.pattern, row.system, row.num_gpus, row.num_bytes
            groups.setdefault(key, []).append(row)
    return groups


def against_libraries(folder: Path) -> dict[str, Any]:
    """Figures of the table of libraries."""
    rows = read_libraries(folder)
    members = judged(rows)
    decided = list(choices(rows))
    large = [choice for choice in decided if choice[0] >= FROM_BYTES]
    unknown = {f"{row.label} ({row.pattern})": row.why_not or "no such software" for row in rows if row.call is None}
    return {
        "implementation_rows": len(members),
        "implementation_median": median(members),
        "own_kernels_median": median(row for row in members if row.call is not None and row.call.name != "nccl"),
        "by_implementation": by_software(members),
        "fastest_right": float(np.mean([right for _, right, _ in decided])),
        "fastest_right_from_256_kib": float(np.mean([right for _, right, _ in large])),
        "fastest_groups": len(decided),
        "ratio_p90": ratio_p90(rows),
        "largest_loss_of_a_choice": max(loss for *_, loss in decided),
        "not_judged": unknown,
        "misses": [_miss(row) for row in sorted(members, key=lambda row: -abs(row.error))[:8]],
    }


def ratio_p90(rows: Iterable[LibraryRow]) -> float:
    """90th percentile of the errors [natural logarithm] of times of software over the library's in its group."""
    errors = list[float]()
    for members in _groups(rows).values():
        of_library = [row for row in members if row.call is not None and row.call.name in _LIBRARIES]
        for row in members:
            if of_library and row not in of_library and not row.is_fitted():
                ours, measured = of_library[0].predicted_s, of_library[0].seconds
                errors.append(abs(float(np.log(row.predicted_s / ours * measured / row.seconds))))
    return float(np.quantile(errors, 0.9))


def _miss(row: LibraryRow) -> str:
    size = f"{row.num_bytes:.0f} B on {row.num_gpus} GPUs"
    return f"{row.label}, {row.pattern} of {size}: {1e6 * row.predicted_s:.1f} for {1e6 * row.seconds:.1f} us"


def against_xla(folder: Path) -> dict[str, Any]:
    """Figures of XLA's tables."""
    rows = {gpu: judged(read_xla(folder, gpu)) for gpu in XLA_GPUS}
    every = list(itertools.chain(*rows.values()))
    collectives = [row for row in every if row.pattern != "send_recv"]
    return {
        "xla_rows": len(every),
        "xla_collectives_median": median(every),
        "xla_without_permutes_median": median(collectives),
        "xla_by_gpu": {gpu: median(members) for gpu, members in rows.items()},
        "xla_by_pattern": {
            pattern: median(row for row in every if row.pattern == pattern)
            for pattern in sorted({row.pattern for row in every})
        },
    }


def against_gemms(folder: Path) -> dict[str, Any]:
    """Figures of whole operations, one GEMM and its collective."""
    rows, _ = predict_pairs(folder / GEMMS)
    members = [row for row in rows if not row.fitted]
    errors = [
        abs(predicted / measured - 1)
        for row in members
        for predicted, measured in zip(row.predicted, row.measured[:2], strict=True)
        if measured is not None
    ]
    return {
        "gemm_with_collective_rows": len(members),
        "gemm_with_collective_median": float(np.median(errors)),
        "gemm_with_collective_sign": float(np.mean([row.right_sign for row in members])),
    }


def against_exchanges(folder: Path) -> dict[str, Any]:
    """Figures of dispatch and combine over EFA, which nothing was fitted on."""
    errors = errors_of(folder / EXCHANGES)
    return {"moe_dispatch_rows": len(errors), "moe_dispatch_median": float(np.median(np.abs(errors)))}


# ---------------------------------------------------------------- models alone


def questions() -> Iterator[tuple[System, Pattern, str]]:
    """Yield machine, pattern and name of software that runs it among the GPUs of a node."""
    for name in list_options("system"):
        system = System.model_validate(tree_of(name))
        if system.node is None or system.node.library is None:
            continue
        for pattern, software in itertools.product(get_args(Pattern), names()):
            if refusal(_call(software), system, question_of(system, pattern)) is None:
                yield system, pattern, software


def _call(name: str) -> Call:
    return Call(name, within_sizes=False)


def question_of(system: System, pattern: Pattern) -> Question:
    """The sizes of the checks among all GPUs of a node."""
    return Question.of(pattern, SIZES, system.node.num_gpus)


def doors(system: System, pattern: Pattern, name: str) -> dict[str, Any]:
    """Times by every door that answers with a function of its own: costs, steps, schedules."""
    gpus, call = system.node.num_gpus, _call(name)
    group = machine_ring(system, gpus)
    answers: dict[str, Any] = {"costs": collective_cost(pattern, call, SIZES, group, element_bytes=2).seconds}
    if name in _LIBRARIES:
        work = Exchange(pattern, SIZES, "tp")
        answers["steps"] = collective(work, group).seconds
        over: Any = pattern
        if pattern in get_args(LinkPattern) and is_measured(system, over) and system.gpu.cu_copy is not None:
            by = TransferMode("cu", library_cus(system, over), over)
            answers["schedules"] = alone(system, SIZES, by=by)
    if name == "multimem" and path_of(call, system, pattern, gpus)[0] == "switch":
        work = Exchange(pattern, SIZES, "tp")
        answers["steps"] = collective(work, replace(group, in_switch=system.node.switch())).seconds
    return answers


def unequal() -> tuple[int, list[str]]:
    """Number of questions that several doors answer, and those to which they answer differently."""
    count, apart = 0, list[str]()
    for system, pattern, name in questions():
        answers = doors(system, pattern, name)
        count += len(answers) > 1
        first = np.asarray(answers["costs"], float)
        apart_doors = [door for door, values in answers.items() if not np.allclose(values, first, rtol=_NEAR, atol=0)]
        apart += [f"{system.name} {pattern} {name}: {', '.join(apart_doors)}"] if apart_doors else []
    return count, apart


def monotone_checks(system: System, pattern: Pattern, name: str) -> dict[str, bool]:
    """Whether time never falls with the payload, with GPUs at a switch, and with slower links that bound it."""
    by_size = collective_seconds(system, pattern, SIZES, system.node.num_gpus, _call(name))
    checks = {"size": bool(np.all(np.diff(by_size) >= -_NEAR * by_size[1:]))}
    if system.node.topology == "switch" and pattern != "send_recv":
        checks["GPUs"] = _never_falls(system, pattern, name)
    if system.node.link_bytes_per_s is not None:
        checks["links"] = _never_rises(system, pattern, name)
    return checks


def monotone() -> tuple[int, list[str]]:
    """Number of checks, and those that break; measured laws step where libraries change their protocol."""
    count, broken = 0, list[str]()
    for system, pattern, name in questions():
        if name not in _LIBRARIES:
            checks = monotone_checks(system, pattern, name)
            count += len(checks)
            broken += [f"{system.name} {pattern} {name} by {what}" for what, holds in checks.items() if not holds]
    return count, broken


def _never_falls(system: System, pattern: Pattern, name: str) -> bool:
    """Whether more GPUs of a node never take less time, but for what each of them sends less."""
    before, sent = np.zeros(SIZES.shape), np.ones(SIZES.shape)
    for gpus in range(2, min(system.node.num_gpus, _MOST_GPUS) + 1):
        if refusal(_call(name), system, Question.of(pattern, SIZES, gpus)) is None:
            cost = collective_cost(pattern, _call(name), SIZES, machine_ring(system, gpus), element_bytes=2)
            if np.any(cost.seconds < before * np.minimum(1.0, cost.wire_bytes / sent) * (1 - _NEAR)):
                return False
            before, sent = cost.seconds, cost.wire_bytes
    return True


def _never_rises(system: System, pattern: Pattern, name: str) -> bool:
    """Whether faster links never take more time, and none carry more than they can: so less where links bound it."""
    rate, before = system.node.link_bytes_per_s, np.full(SIZES.shape, np.inf)
    for factor in _LINKS:
        machine = put(system, "node.link_bytes_per_s", factor * rate)
        group = machine_ring(machine, system.node.num_gpus)
        cost = collective_cost(pattern, _call(name), SIZES, group, element_bytes=2)
        carried_s = cost.wire_bytes / sum(np.asarray(each) for each in links(machine.node).values())
        if np.any(cost.seconds > before * (1 + _NEAR)) or np.any(carried_s > cost.seconds * (1 + _NEAR)):
            return False
        before = cost.seconds
    return True


def figures(folder: Path | None) -> dict[str, Any]:
    """All figures of the module."""
    result = dict[str, Any]()
    if folder is not None:
        result |= against_libraries(folder)
        result |= against_xla(folder)
        result |= against_gemms(folder)
        result |= against_exchanges(folder)
    result |= per_site()
    result["files_read_back"] = count_read_back()
    count, apart = unequal()
    result |= {"cost_questions": count, "unequal_costs": len(apart), "unequal": apart}
    count, broken = monotone()
    return result | {"monotone_checks": count, "monotone_breaks": len(broken), "broken": broken}


def main(words: Sequence[str] | None = None) -> int:
    """Print the figures; the exit code is 1 where doors differ or a check breaks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.libraries", description=str(__doc__).splitlines()[0])
    parser.add_argument("--data", type=given_folder, metavar="DIR", help="folder of measured tables")
    parser.add_argument("--json", action="store_true", help="print JSON")
    typed = parser.parse_args(words)
    result = figures(typed.data)
    if typed.json:
        print(json.dumps(result, indent=1))
    else:
        print(*(f"{name:<28}{_text(value)}" for name, value in result.items()), sep="\n")
    return int(bool(result["unequal"] or result["broken"]))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(
            f"\n  {name:<26}{_text(of)}" if not isinstance(of, dict) else _line(name, of) for name, of in value.items()
        )
    if isinstance(value, list):
        return "".join(f"\n  {item}" for item in value) or "none"
    return "no rows" if value is None else str(value) if isinstance(value, (str, int)) else f"{value:.4g}"


def _line(name: str, of: dict[str, Any]) -> str:
    return f"{name:<26}{of['rows']:>5} rows  {of['median']:.4g}"


if __name__ == "__main__":
    sys.exit(main())
