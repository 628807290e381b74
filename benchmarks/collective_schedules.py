"""How far synthesised collectives are from their bounds, and from algorithms of libraries for small sizes.

`python -m benchmarks.collective_schedules --json` prints `collective_gap_worst`, the largest time over its bound, less
one, of all-gather and all-to-all of 256 MiB to 4 GiB on the MI300X mesh and on two nodes of four GPUs; and
`small_slower`, in how many cases of at most 1 MiB a library's algorithm is faster. Without --json: every case.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dse_collectives.command import machine_of
from dse_collectives.explicit import Collective
from dse_collectives.replay import seconds
from dse_collectives.synthesis import Synthesiser
from dse_collectives.topology import topology_of

FABRICS = (("mi300x_8", ()), ("mi210_16x4", ("system.fabric.num_nodes=2",)))
PATTERNS: tuple[Collective, ...] = ("all_gather", "all_to_all")
SMALL = tuple(2.0**power for power in range(8, 21, 2))
LARGE = tuple(2.0**power for power in (28, 30, 32))


@dataclass(frozen=True)
class Case:
    """One size. seconds: of the synthesised schedule; best_s: of the fastest algorithm of libraries."""

    system: str
    collective: Collective
    num_bytes: float
    seconds: float
    best_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """Time over the bound, less one."""
        return self.seconds / self.bound_s - 1


def cases() -> Iterator[Case]:
    """Yield every case."""
    for system, words in FABRICS:
        topology = topology_of(machine_of(system, words))
        for collective in PATTERNS:
            maker = Synthesiser(collective, topology)
            sizes = (*SMALL, *LARGE)
            library = np.array([seconds(schedule, topology, sizes) for schedule in maker.library.values()]).min(axis=0)
            for size, made, best_s in zip(sizes, maker.synthesise_sizes(sizes), library, strict=True):
                bound_s = maker.bound(size).seconds
                yield Case(system, collective, size, made.seconds, float(best_s), bound_s)


def measure() -> dict[str, float]:
    """`collective_gap_worst` and `small_slower`."""
    ran = list(cases())
    return {
        "collective_gap_worst": max(case.gap for case in ran if case.num_bytes in LARGE),
        "small_slower": sum(case.seconds > case.best_s for case in ran if case.num_bytes in SMALL),
    }


def main() -> None:
    """Print the two numbers, or every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print the two numbers as JSON")
    if parser.parse_args().json:
        print(json.dumps(measure()))
        return
    for case in cases():
        times = f"{case.seconds * 1e6:12.2f} us, best of libraries {case.best_s * 1e6:12.2f} us"
        size = f"{case.num_bytes / 2**20:10.4g} MiB"
        print(f"{case.system:12} {case.collective:11} {size} {times}, {100 * case.gap:7.2f} % over the bound")


if __name__ == "__main__":
    main()
