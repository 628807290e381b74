"""LeNet and its convolutions as kernels in PTX that run on simulated SMs (claims of arXiv:1811.08933).

For every launch what AerialVision (ISPASS 2010) shows: instructions, stalls by cause, warps, caches and channels over
time, and phases. Kernels are ours, by four algorithms; cuDNN's are not public.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dse.plots import Axis, Draw, FigureSheet, Frame, tables
from dse.results.claims import Claim, ClaimResult
from dse.results.run_folder import FinishedRun
from dse_memory.convolution_patterns import ConvolutionPatterns
from dse_ptx.networks import CONVOLUTIONS, TimedLaunch, timed_launches
from dse_ptx.phases import LaunchPhase, camping_factor, figures, perfetto, phases_of, table
from dse_ptx.sms import sm_array
from studies.plain import Plain

if TYPE_CHECKING:
    import pandas as pd

_ALGORITHM, _HASH, _IMAGES, _GPU = "work.algorithm", "sms.channel_hash", "work.images", "sms.gpu"
_LENET, _CAMPS, _CALLS = "lenet", 2.0, 3
# _CAMPS: lines of the busiest channel over the mean's, from which on a call camps
_DIFFERS = 0.1  # of the peak, from which on phases differ
_PERCENT = 100.0
_NO_REFERENCE = "no public measurement of LeNet on this GPU, and cuDNN's kernels are not ours"


class Gpgpusim(Plain):
    """Claims, launches, and activity over time."""

    columns = (_ALGORITHM, _HASH, _IMAGES, _GPU)
    allows = ("works", "work")

    def claims(self) -> list[Claim]:
        """Published claims: those of `study=convolution_patterns`, which judges patterns by them."""
        return ConvolutionPatterns().claims()

    def findings(self, table: pd.DataFrame) -> Mapping[str, ClaimResult]:
        """Findings of every claim."""
        ok = _ok(table)
        absent = ("gpgpusim.lenet_v1", "gpgpusim.lenet_ispass", "gpgpusim.kernel_corr")
        return {
            **dict.fromkeys(absent, ClaimResult(None, _NO_REFERENCE)), **_floors(ok), **_phases(ok), **_camping(ok)
        }  # fmt: skip

    def figures(self, table: pd.DataFrame, timelines: pd.DataFrame) -> Iterator[tuple[str, Draw]]:
        """Camping by algorithm, before and after a hash."""
        ok = _ok(table)
        if len(ok):
            yield "camping", partial(_camping_figure, ok)

    def extras(self, run: FinishedRun) -> Iterator[tuple[str, Any]]:
        """Launches, their intervals and phases, and of the longest launch of each work by each algorithm figures."""
        import pandas as pd

        ok = _ok(run.outputs.read_table("results"))
        rows, intervals = list[dict[str, Any]](), list[Any]()
        for labels, launches in _runs(ok):
            name = "_".join(str(labels[key]) for key in ("work", "algorithm"))
            for place, launch in enumerate(launches):
                rows.append({**labels, "launch": place, **_row(launch)})
                intervals.append(table_of(labels, place, launch))
            # one figure for each work and algorithm: the hash changes where lines lie, not which are moved
            if labels["hash"] == "none":
                longest = max(launches, key=lambda launch: launch.time.seconds)
                for kind, draw in figures(longest.time, longest.kernel):
                    yield f"{name}_{kind}", draw
                yield f"trace_{name}", perfetto([(longest.kernel, longest.time)])
        if rows:
            yield "launches", pd.DataFrame(rows)
            yield "intervals", pd.concat(intervals, ignore_index=True)


def table_of(labels: Mapping[str, Any], place: int, launch: TimedLaunch) -> pd.DataFrame:
    """Intervals of a launch, labelled."""
    rows = table(launch.time)
    return rows.assign(**labels, launch=place, kernel=launch.kernel)


def _ok(table: pd.DataFrame) -> pd.DataFrame:
    ok = table[table["status"] == "ok"]
    return ok.astype({name: str for name in ("scenario", _ALGORITHM, _HASH) if name in ok})


def _runs(ok: pd.DataFrame) -> Iterator[tuple[dict[str, Any], tuple[TimedLaunch, ...]]]:
    """Labels and launches of every point; they are executed again, which takes seconds."""
    for row in ok.to_dict("records"):
        labels = {"work": row["scenario"], "algorithm": row[_ALGORITHM], "hash": row[_HASH]}
        size = int(row[_IMAGES]), str(row[_GPU])
        yield labels, timed_launches(labels["work"], labels["algorithm"], *size, labels["hash"])


def _row(launch: TimedLaunch) -> dict[str, Any]:
    done = launch.time
    slots = {f"slots: {name}": share for name, share in done.slot_shares.items()}
    return {
        "kernel": launch.kernel, "seconds": done.seconds, "ipc": done.ipc, "l1_hit_rate": done.l1_hit_rate,
        "l2_hit_rate": done.l2_hit_rate, "dram_bytes": done.dram_bytes, "camping": camping_factor(done),
        "phases": len(phases_of(done)), **slots,
    }  # fmt: skip


def _floors(ok: pd.DataFrame) -> dict[str, ClaimResult]:
    """Share of launches in LeNet's time, by its fastest algorithm."""
    lenet = ok[ok["scenario"] == _LENET]
    if lenet.empty:
        return {"gpgpusim.floors": ClaimResult(None, f"needs works=[{_LENET}]")}
    # the fastest algorithm, which a library would choose
    best = lenet.sort_values("time_s").iloc[0]
    text = f"{best['kernels']:.0f} launches in {1e6 * best['time_s']:.0f} us, by {best[_ALGORITHM]}"
    share = _PERCENT * float(best["launch_share"])
    each_us = 1e6 * best["time_s"] / best["kernels"]
    cause = (
        f"a kernel lasts {each_us * (1 - best['launch_share']):.1f} us, its launch {each_us * best['launch_share']:.1f}"
    )
    cause += f", and {best['issued']:.0%} of slots issue: convolutions have few blocks, and products need instructions"
    return {"gpgpusim.floors": ClaimResult(share, text, f"{cause} that patterns lack")}


def _phases(ok: pd.DataFrame) -> dict[str, ClaimResult]:
    """Tell whether most convolutions have two phases that differ in instructions and in DRAM."""
    calls = {
        f"{labels['work']} by {labels['algorithm']}": launches
        for labels, launches in _runs(ok[ok["scenario"].isin(CONVOLUTIONS)])
        if labels["hash"] == "none"
    }
    # the claim is about most calls, so that a few are needed
    if len(calls) < _CALLS:
        return {"gpgpusim.phases": ClaimResult(None, f"needs {_CALLS} convolutions, such as conv1 by all algorithms")}
    several = [name for name, launches in calls.items() if _differ(launches)]
    points = f"{_PERCENT * _DIFFERS:.0f} points"
    text = f"{len(several)} of {len(calls)} calls have two that differ by {points} in instructions and in DRAM"
    text += f": {', '.join(several) or 'none'}"
    few = {name: _busiest(launches) for name, launches in calls.items() if name not in several}
    cause = f"no phase of {sum(share < _DIFFERS for share in few.values())} of the others takes {points} of DRAM's rate"
    cause += f"; the most is {max(few.values(), default=0.0):.0%}"
    return {"gpgpusim.phases": ClaimResult(2 * len(several) > len(calls), text, cause)}


def _busiest(launches: tuple[TimedLaunch, ...]) -> float:
    """Largest share of DRAM's rate that a phase of all launches takes."""
    return max(phase.dram for launch in launches for phase in phases_of(launch.time))


def _differ(launches: tuple[TimedLaunch, ...]) -> bool:
    """Tell whether two phases of all launches differ in both."""
    sm = launches[0].time.machine.sm
    peak = sm.schedulers * sm.issue_width
    all_phases: list[LaunchPhase] = [phase for launch in launches for phase in phases_of(launch.time)]
    return any(
        abs(phase.ipc - other.ipc) > _DIFFERS * peak and abs(phase.dram - other.dram) > _DIFFERS
        for phase in all_phases
        for other in all_phases
    )


def _camping(ok: pd.DataFrame) -> dict[str, ClaimResult]:
    """Largest camping of convolutions without a hash, and of the same ones with one."""
    names = ("gpgpusim.camping", "gpgpusim.camping_no_hash", "gpgpusim.camping_hash")
    # the published claim is about cuDNN's calls; the transposed product is our own, and only named in the text
    calls = ok[ok["scenario"].isin((*CONVOLUTIONS, _LENET))]
    plain, hashed = (calls[(calls[_HASH] == "none") == is_plain] for is_plain in (True, False))
    if plain.empty or hashed.empty:
        return dict.fromkeys(names, ClaimResult(None, f"needs {_HASH} searched (none and xor)"))
    worst = plain.sort_values("camping").iloc[-1]
    text = f"{worst['scenario']} by {worst[_ALGORITHM]}"
    other = ok[ok["scenario"] == "transposed"].groupby(_HASH)["camping"].max()
    if len(other) > 1:
        text += f"; a product whose columns lie 16 KB apart {other['none']:.2f}x, with a hash {other['xor']:.2f}x"
    lines = worst["dram_bytes"] / sm_array(str(worst[_GPU])).memory.gpu.line_bytes
    cause = (
        f"it spreads {lines:.0f} lines: the busiest channel moves {worst['camping']:.2f}x the mean, and no call more"
    )
    camps = plain[plain["camping"] > _CAMPS]
    findings = {
        names[0]: ClaimResult(not camps.empty, text, cause),
        names[1]: ClaimResult(float(worst["camping"]), text, cause),
    }
    if camps.empty:
        return {**findings, names[2]: ClaimResult(None, "no convolution camps without a hash")}
    same = hashed.merge(camps[["scenario", _ALGORITHM]], on=["scenario", _ALGORITHM])
    return {**findings, names[2]: ClaimResult(float(same["camping"].max()), text, "the hash leaves strides on few")}


def _camping_figure(ok: pd.DataFrame) -> FigureSheet:
    rows = ok.assign(mapping=ok[_HASH].replace({"none": "without a hash", "xor": "with a hash"}))
    rows["algorithm"] = rows[_ALGORITHM].str.replace("_", " ")
    most = rows.groupby("mapping")["camping"].max()
    words = ", ".join(f"{value:.2f}x {name}" for name, value in most.items())
    frame = Frame(f"The busiest channel moves up to {words}", "lines over the mean channel's [x]", "mapping")
    value = Axis("camping", "lines over the mean channel's [x]", centre=1.0)
    return tables.heat(rows, value, x=Axis("algorithm", "algorithm"), y="scenario", frame=frame)


STUDY = Gpgpusim()
