"""Effects of changes of a recorded run where nothing was measured: `conf/data/assumed_changes.yaml`, with sources."""

from __future__ import annotations

from functools import cache
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dse.config.options import load_yaml
from dse.errors import validate_as
from dse.values.units import Number
from dse_traces import DATA
from simulators.hardware.parts import SourcedValue

Share = Annotated[Number, Field(ge=0)]
Cases = tuple[Share, Share, Share]
"""A value in the mild, the expected and the severe case of the laws (`dse_traces.laws.contention.CASES`)."""


class AssumedChanges(SourcedValue):
    """Effects that are assumed.

    fixed_s: time of a kernel that does nothing [s]. halves_unknown: time of two halves of a kernel over its own, where
    its workgroups are not known. latency: of a collective over that of the machine. vanishes, vanishes_of_rows: share
    of a kernel's time that ends when it is fused with the one before; of sums over rows after a GEMM. share_spread: of
    the share of a collective's time that its SMs explain.
    """

    name: str
    description: str
    fixed_s: Cases
    halves_unknown: Cases
    latency: Cases
    vanishes: Cases
    vanishes_of_rows: Cases
    share_spread: Cases

    def cases(self, name: str) -> NDArray[np.float64]:
        """The three cases of an effect [3]."""
        return np.array(getattr(self, name), float)


@cache
def assumed_changes() -> AssumedChanges:
    """The effects of `conf/data/assumed_changes.yaml`. Raises ConfigError."""
    return validate_as(AssumedChanges, load_yaml(DATA / "assumed_changes.yaml"), path="assumed_changes")
