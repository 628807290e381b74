"""The command `store rebase`: results of an older store under the present content keys.

Keys are hashes of what a design says; those of stores of version 1, of names that knobs of schedules have no more.
A key does not tell its design. So each study is planned again from its recorded command, the design of each recorded
point is made again, and a result is carried over where it was recorded under the former key of that design. All changes
are one transaction; a result whose design could not be made again keeps its key, and may be carried over another time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel
from sqlalchemy import func, select

from dse.errors import ConfigError, Problem, pairs, validate_as
from dse.errors.parsing import parse_json
from dse.errors.terminal import bar
from dse.store.contract import Context, StoreAt, key_bytes
from dse.store.database import StoreError, is_missing
from dse.store.owner import Owner
from dse.store.result_rows import fits
from dse.store.result_store import FORMER_SCHEMA, SCHEMA, Store, owners, results, studies
from dse.study.fidelity import point_at_level
from dse.study.levels import Level
from dse.study.plan import Plan
from dse.study.plan_again import Present, plan_stored
from dse.values import Keys, content_keys, grid_content_keys, leaves

_NAMES: Mapping[str, Mapping[str, str]] = {
    "serial": {"comm_engine": "mover"},
    "shard_p2p": {"comm_engine": "mover"},
    "signalled": {"comm_engine": "mover"},
    "concurrent": {"comm_engine": "mover", "launch_order": "order"},
    "chunked": {
        "comm_engine": "mover",
        "chunk_dim": "shape",
        "local_shard_first": "start",
        "num_chunks": "granularity",
    },
    "fused": {"num_chunks": "slices", "issue_order": "order"},
    "triggered": {"num_chunks": "stages"},
    "streams": {"num_streams": "degree"},
}
"""Family of schedules -> knob -> its former name."""
_VALUES: Mapping[str, Mapping[Any, str]] = {
    "chunk_dim": {"m": "1d", "k": "2d"},
    "local_shard_first": {False: "uniform", True: "hetero"},
}
"""Knob -> value -> its former name, where values were renamed."""


def rebase(words: Sequence[str]) -> int:
    """`store rebase [store=<URL>] [output_dir=outputs] [config_dir=] [command=]`: 3 if some could not be carried."""
    options = pairs(words, {"store": "auto", "output_dir": "outputs"}, optional=["config_dir", "command"])
    store_at = validate_as(StoreAt, {"name": "rebase", "url": options["store"]}, path="store")
    url = store_at.database_url(Path(options["output_dir"]))
    if is_missing(url):
        raise ConfigError([Problem("output_dir", "holds no results.db", options["output_dir"], "run a study first")])
    # the present one, too: results that were left may be carried over another time
    store = Store(url, schemas=(FORMER_SCHEMA, SCHEMA))
    _check_idle(store)
    keys, left = present_keys(store, Present.of(options))
    store.rebase(keys)
    for study, count in left.items():
        print(f"study {study}: {count} results could not be made again, and keep their keys", file=sys.stderr)
    print(f"{store.database}: {len(keys)} results were carried over")
    return 3 if left else 0


def _check_idle(store: Store) -> None:
    """Refuse a store that a process of this machine is at work on. Raises StoreError."""
    rows = store.database.read(lambda connection: connection.execute(select(owners)).all())
    # owners on other machines cannot be asked
    known = [owner for row in rows if (owner := Owner(row.host, row.boot, row.space, row.pid, row.started)).is_known]
    if busy := [str(owner.pid) for owner in known if not owner.gone]:
        raise StoreError(f"{store.database} is in use by process {', '.join(busy)}: end it first")


def present_keys(store: Store, present: Present) -> tuple[dict[bytes, bytes], Counter[int]]:
    """Return former key -> present key of the results to be carried over, and number of the others by study."""
    plans, keys, left = dict(_plans(store, present)), dict[bytes, bytes](), Counter[int]()
    with bar("rebase", _num_results(store), "results") as advance:
        for page in store.pages():
            for row in filter(fits, page):  # damaged rows are left to `check`
                made_in, planned = store.context(row.context), plans.get(row.study)
                key = _present_key(row, made_in, planned) if made_in and planned else None
                if key is None:
                    left[row.study] += 1
                elif key != row.key:  # already under its present key
                    keys[row.key] = key
            advance(len(page))
    return keys, left


def _num_results(store: Store) -> int:
    query = select(func.count()).select_from(results)
    return int(store.database.read(lambda connection: connection.execute(query).scalar_one()))


def _plans(store: Store, present: Present) -> Iterator[tuple[int, Plan]]:
    """Yield number and plan of each study that can be planned again; the others are printed, with the reason."""
    for row in store.database.read(lambda connection: connection.execute(select(studies)).all()):
        try:
            yield row.id, plan_stored(row, present)
        except ConfigError as error:
            reasons = "; ".join(map(str, error.problems))
            print(f"study {row.id} ({row.name}) cannot be planned any more: {reasons}", file=sys.stderr)


def _present_key(row: Any, made_in: Context, planned: Plan) -> bytes | None:
    """The present key of a recorded result; None where no design of its point has or had the recorded key."""
    for design in _designs(planned, parse_json(row.point, "point")):
        now = content_keys(design, context=made_in.words)
        # a sum of hashes: renamed leaves shift it by a constant
        present, former = key_bytes(np.concatenate([now, now + former_shift(design)]))
        if row.key in (present, former):
            return present
    return None


def _designs(planned: Plan, point: Mapping[str, Any]) -> Iterator[BaseModel]:
    """Yield the designs that a recorded point may be: as it was written, then at each level with idle knobs settled."""
    scenario, assignment = str(point.get("scenario")), {path: point[path] for path in point if path != "scenario"}
    own_level = Level(planned.spec.name, planned.spec, own=True)
    for part in (part for part in (planned, *planned.probes.values()) if scenario in part.spaces):
        space = part.spaces[scenario]
        with suppress(ConfigError, KeyError):  # of a value or an option that is there no more
            yield space.backend.design(space.tree(assignment))
            for level in planned.levels or [own_level]:  # a result may be of any level
                if (design := point_at_level(part, level, scenario, assignment).design) is not None:
                    yield design


def former_shift(design: BaseModel) -> Keys:
    """The key of a design under former names less its present key, [1, 2]: a key is the sum of the hashes of leaves."""
    leaf_values = {path: value for path, value, _ in leaves(design)}
    present, former = dict[str, Any](), dict[str, Any]()
    for path in (path for path in leaf_values if path.endswith(".family")):  # each schedule of a design has its own
        section = path.removesuffix("family")
        for name, former_name in _NAMES.get(leaf_values[path], {}).items():
            value = present[section + name] = leaf_values[section + name]
            former[section + former_name] = _VALUES.get(name, {}).get(value, value)  # values that were not renamed stay
    return _sum_of_hashes(former) - _sum_of_hashes(present)


def _sum_of_hashes(values: Mapping[str, Any]) -> Keys:
    return grid_content_keys([f"{path} = {value!r}" for path, value in values.items()], {})
