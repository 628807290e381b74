"""Cache policies: which requests are kept, as recalled of "Optimizing GPU Cache Policies for MI Workloads".

The abstract (arXiv:1910.00134) does not define its policies: their names and meaning are recollection.

loads, stores   whether L1 and L2 keep what is loaded, and L2 what is stored until it is evicted or the kernel ends;
                else a load is merged with others that are under way, and a store is written through
allocation_bypass   a request whose set holds only lines under way passes the cache by, and does not wait
rinse           a dirty line that is evicted takes all dirty lines of its row of DRAM along (a dirty-block index)
predictor       loads and stores of an instruction whose lines nobody uses again pass L2 by. A counter for each
                instruction falls with every line that is evicted unused from one in `sampled_sets` sets, where
                all is kept, and rises by `reward` when a line is used; at 0 the others pass by
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from dse.values import Frozen
from dse.values.units import Integer


class Predictor(Frozen):
    """Counters of instructions: one set in `sampled_sets` teaches them; they rise by `reward`, to `most`.

    loads, stores: what they begin with.
    """

    sampled_sets: Annotated[Integer, Field(ge=1, le=1024)]
    reward: Annotated[Integer, Field(ge=1, le=1024)]
    most: Annotated[Integer, Field(ge=1, le=2**16)]
    loads: Annotated[Integer, Field(ge=0, le=2**16)]
    stores: Annotated[Integer, Field(ge=0, le=2**16)]

    @model_validator(mode="after")
    def _begins_within_its_range(self) -> Self:
        if max(self.loads, self.stores) > self.most:
            raise ValueError(f"loads or stores begin above most = {self.most}")
        return self


class Policy(Frozen):
    """Requests that L1 and L2 keep."""

    name: str
    description: str = ""
    loads: bool
    stores: bool
    allocation_bypass: bool
    rinse: bool
    predictor: Predictor | None

    @model_validator(mode="after")
    def _stores_are_kept_with_loads(self) -> Self:
        if self.stores and not self.loads:  # L2 looks up loads only where they are kept
            raise ValueError("stores are kept only where loads are: set loads: true, or stores: false")
        return self
