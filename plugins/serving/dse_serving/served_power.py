"""Measured power of boards that serve: closed loops of requests, tokens a second, watts of a GPU, joules of a token.

A table has the columns of InferenceX's power runs (`COLUMNS`). Lengths of prompts and answers are the means that follow
from the joules of a request and of a token. `fit_tree` fits what a board draws beside its operations and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dse.backend import Batch
from dse.config.options import conf_dir
from dse.errors import ConfigError, Problem
from dse.files import cell_number, read_csv
from dse_serving.backend import ServingBackend
from dse_serving.design import Serving
from dse_serving.energy import ServedPower, ServedTraffic, served_power
from dse_serving.measured import Row, design_tree, system_name
from simulators.hardware.machine import tree_of
from simulators.hardware.parts import Power

TABLE = conf_dir() / "data" / "power" / "b200_served.csv"
COLUMNS = (
    *("model", "gpu", "precision", "engine", "isl", "osl", "concurrency", "disaggregated", "gpus", "decode_tp"),
    *("prefill_tp", "prefill_dp_attention", "decode_dp_attention", "output_tokens_per_s_per_gpu", "w_per_gpu"),
    *("j_per_request", "j_per_input_token", "j_per_output_token"),
)


@dataclass(frozen=True)
class ServedRow:
    """A row of a table: cells by column."""

    cells: Mapping[str, str]

    def number(self, column: str) -> float:
        """A number of the row. Raises ConfigError."""
        return cell_number(self.cells, column, self.name)

    @property
    def name(self) -> str:
        """What tells rows apart."""
        together = "apart" if self.apart else "together"
        return f"{self.cells['engine']} {self.cells['concurrency']} {together}"

    @property
    def apart(self) -> bool:
        """Tell whether prompts have engines of their own."""
        return self.cells["disaggregated"] == "1"

    @property
    def watts(self) -> float:
        """Mean power of a GPU [W]."""
        return self.number("w_per_gpu")

    @property
    def token_j(self) -> float:
        """Energy of a generated token with its share of the prompt [J]."""
        return self.number("gpus") * self.watts / self.traffic.tokens_per_s

    @property
    def traffic(self) -> ServedTraffic:
        """What was served."""
        request_j = self.number("j_per_request")
        lengths = (request_j / self.number(f"j_per_{kind}_token") for kind in ("input", "output"))
        rate = self.number("output_tokens_per_s_per_gpu") * self.number("gpus")
        return ServedTraffic(rate, self.number("concurrency"), *lengths)

    @property
    def tree(self) -> dict[str, Any]:
        """Tree of the deployment: its engines as the runs of other public benchmarks are read."""
        tree = self._tree("decode")
        if self.apart:
            every, gpus = round(self.number("gpus")), round(self.number("decode_tp"))
            tree["system"] = tree_of(system_name(f"{self.cells['gpu'].lower()}_sxm", every))
            # so many engines of prompts, each as large as those that generate
            apart = {"apart": True, "prefill_replicas": every // gpus - 1, "replicas": 1, "gpus": every}
            tree["engines"] |= apart
        return tree

    def _tree(self, role: str) -> dict[str, Any]:
        """Tree of engines of one role, as if they did both."""
        gpus, shares = round(self.number(f"{role}_tp")), self.cells[f"{role}_dp_attention"] == "1"
        cells = {
            **{"mode": "agg", "backend": self.cells["engine"].removeprefix("dynamo-")},
            **{"system": f"{self.cells['gpu'].lower()}_sxm", "id": self.name},
            **{"model_path": self.cells["model"], "precision": self.cells["precision"]},
            **{"isl": self.cells["isl"], "osl": self.cells["osl"], "tp_size": str(gpus)},
            "moe_ep_size": str(gpus) if shares else "1",
            "attention_dp_size": str(gpus) if shares else "1",
            "silicon_data_source": f"source_file=2026; silicon_concurrency={self.cells['concurrency']}",
        }
        return design_tree(Row(cells, 0.0, 0.0))

    @cached_property
    def prompts(self) -> Serving | None:
        """Engines of prompts alone; None where engines do both."""
        return ServingBackend().design(self._tree("prefill")) if self.apart else None

    @cached_property
    def design(self) -> Serving:
        """The deployment. Raises ConfigError."""
        backend = ServingBackend()
        design = backend.design(self.tree)
        if problems := backend.problems(design):
            raise ConfigError(list(problems))
        return design

    @property
    def power(self) -> Power:
        """Power model of its boards."""
        return Power.model_validate(self.tree["system"]["gpu"]["power"])

    def drawn(self, power: Power, traffic: ServedTraffic | None = None) -> ServedPower:
        """Watts and joules by the model. traffic: None for what was served. Raises ConfigError."""
        served = served_power(self.design, power, traffic or self.traffic, prompts=self.prompts)
        if served is None:
            rule = "has no energy of the operations of this deployment"
            raise ConfigError([Problem("system.gpu.power", rule, self.name)])
        return served

    def predicted(self, power: Power) -> ServedPower:
        """Watts and joules at the rate that is predicted, too. Raises ConfigError."""
        (results,) = ServingBackend().evaluate([Batch(self.design)])
        if not results.ok[0]:
            raise ConfigError([Problem("row", f"cannot be served: {'; '.join(results.texts)}", self.name)])
        rate, under_way = (float(results.column(name)[0]) for name in ("tokens_per_s", "in_system"))
        traffic = self.traffic
        return self.drawn(power, ServedTraffic(rate, under_way, traffic.prompt, traffic.output))


def read_served(path: Path = TABLE) -> list[ServedRow]:
    """Rows of a table with `COLUMNS`. Raises ConfigError."""
    return [ServedRow(cells) for _, cells in read_csv(path, needed=COLUMNS).rows]


def unfitted(rows: Sequence[ServedRow]) -> Iterator[ServedRow]:
    """Yield the rows whose watts are not among those that were fitted."""
    fitted = {_identity(row) for row in read_served()}
    yield from (row for row in rows if _identity(row) not in fitted)


def _identity(row: ServedRow) -> tuple[str, str, float]:
    """What is the same in a row of any table: its GPU, engines and requests, and watts to the last printed digit."""
    return row.cells["gpu"].lower(), row.name, round(row.watts, 2)


def fit_tree(rows: Sequence[ServedRow], power: Power) -> float:
    """`power.tree_w` with which the mean logarithm of the errors of the watts of rows is zero.

    Raises ConfigError where none between 0 and the board's limit does.
    """
    from scipy.optimize import brentq

    def off(tree_w: float) -> float:
        tried = power.model_copy(update={"tree_w": tree_w})
        return float(np.mean([np.log(row.drawn(tried).gpu_w / row.watts) for row in rows]))

    if off(0.0) > 0 or off(power.board_w) < 0:
        rule = f"has no value up to the board's {power.board_w:,.0f} W with which these rows are right"
        raise ConfigError([Problem("system.gpu.power.tree_w", rule, ", ".join(row.name for row in rows))])
    return float(brentq(off, 0.0, power.board_w))
