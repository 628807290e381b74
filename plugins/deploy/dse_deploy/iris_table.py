"""The table of Iris' concurrent GEMMs and collectives: tile and workgroups of the GEMM, by shape.

`iris.concurrent.autotune` looks a shape up in a file of JSON (`IRIS_CONCURRENT_CACHE`) before it measures anything. A
key names the architecture, the GPUs, the workgroups of both, the mode, the collective, and the sizes of the GEMM and of
the tensor that is exchanged; its entry has `gemm_wgs`, of which the collective takes the rest, and `gemm_block`. An
entry of another key is never found there, without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dse.errors import ConfigError, Problem, Problems
from dse.errors.parsing import parse_json
from dse_deploy.distinct import TWICE, repeated_keys
from dse_deploy.step_calls import Call
from dse_deploy.tuner_file import library_files
from dse_deploy.tuner_plan import channels_of
from studies.plan.plan_file import Plan

_KEY = re.compile(
    r"arch=(?P<arch>[^|]+)\|world=(?P<world>[0-9]{1,6})\|nwg=(?P<nwg>[0-9]{1,6})\|mode=(?P<mode>fused|concurrent)"
    r"\|coll=(?P<coll>\w+)\|g=(?P<g>[0-9]+x[0-9]+x[0-9]+)\|c=(?P<c>[0-9]+x[0-9]+)"
)


def arch_of(gpu: str) -> str | None:
    """Name of the architecture of a GPU as PyTorch has it; None where it is not known."""
    names: Mapping[str, str] = library_files()["iris"]["architectures"]
    return names.get(gpu)


def key_of(call: Call, arch: str, num_cus: int) -> str | None:
    """The key of a collective beside a GEMM; None where there is no such GEMM."""
    shape = call.beside
    if shape is None:
        return None
    # gradients of weights sum over tokens, which are the rows of what is exchanged
    columns = call.payload_bytes // (shape.element_bytes * shape.k)
    mode = library_files()["iris"]["mode"]
    sizes = f"g={shape.m}x{shape.n}x{shape.k}|c={shape.k}x{columns}"
    return f"arch={arch}|world={call.ranks}|nwg={num_cus}|mode={mode}|coll={call.pattern}|{sizes}"


def configs(calls: Sequence[Call], plan: Plan, arch: str, num_cus: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Key -> site, `gemm_wgs` and `gemm_block`, of each collective to which the plan gives CUs beside a GEMM."""
    blocks, entries = library_files()["iris"]["blocks"], dict[str, tuple[str, dict[str, Any]]]()
    for call in calls:
        cus, key = channels_of(call, plan), key_of(call, arch, num_cus)
        if cus is not None and key is not None:
            block = list(blocks[call.pattern])  # of the operator itself: a plan chooses no tile
            entries[key] = call.site, {"gemm_wgs": num_cus - min(cus, num_cus), "gemm_block": block}
    return entries


def table_text(configs_by_key: Mapping[str, Mapping[str, Any]]) -> str:
    """Text of the file. configs_by_key: key -> `gemm_wgs` and `gemm_block`."""
    tree = {key: {"config": dict(config), "measured_ms": None} for key, config in configs_by_key.items()}
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"


def read_table(text: str, name: str) -> dict[str, Mapping[str, Any]]:
    """Key -> `gemm_wgs` and `gemm_block`. name: of the file, in messages. Raises ConfigError."""
    tree = parse_json(text, name)
    try:
        repeated = list(repeated_keys(text))
    except yaml.YAMLError:  # JSON that YAML cannot read: without lines
        parse_json(text, name, distinct=True)
        repeated = []
    check, read = Problems(), dict[str, Mapping[str, Any]]()
    if not isinstance(tree, Mapping):
        raise ConfigError([Problem(name, "is no mapping of shapes", str(tree)[:40])])
    for line, key in repeated:
        check.add(f"{name}:{line}.{key}", TWICE, way_out="remove one of them")
    for key, entry in tree.items():
        match = _KEY.fullmatch(key)
        config = entry.get("config") if isinstance(entry, Mapping) else None
        if match is None:
            check.add(f"{name}: {key}", "is no key of iris.concurrent, which never finds it", way_out=_KEY_WAY)
        elif not isinstance(config, Mapping):
            check.add(f"{name}: {key}", "has no config", value=entry, way_out="config: {gemm_wgs, gemm_block}")
        else:
            _check_config(check, f"{name}: {key}.config", config, int(match["nwg"]))
            read[key] = config
    check.done(name)
    return read


_KEY_WAY = "arch=...|world=8|nwg=304|mode=fused|coll=all_reduce|g=MxNxK|c=MxN"


def _check_config(check: Problems, at: str, config: Mapping[str, Any], most: int) -> None:
    wgs, block = config.get("gemm_wgs"), config.get("gemm_block")
    if not _is_count(wgs) or not 0 <= int(str(wgs)) <= most:
        check.add(f"{at}.gemm_wgs", f"is no number of workgroups from 0 to {most}", value=wgs)
    sizes = block if isinstance(block, list) else []
    if len(sizes) != len("MNK") or not all(_is_count(size) and size > 0 for size in sizes):
        check.add(f"{at}.gemm_block", "is no list of three sizes", value=block, way_out="[256, 256, 64]")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_entries(read: Mapping[str, Mapping[str, Any]], calls: Sequence[Call], plan: dict[str, Any]) -> list[str]:
    """Put what entries say of the collectives of a step into a plan; return those that are of none of them.

    Keys are compared without the architecture, which the step's GPU is taken to be. Sites that are there stay.
    """
    by_shape = {key.partition("|")[2]: (key, config) for key, config in read.items()}
    used = set[str]()
    for call in calls:
        for shape, (key, config) in by_shape.items():
            workgroups = int(shape.partition("|nwg=")[2].partition("|")[0])
            own = key_of(call, "", workgroups)
            if own is not None and own.partition("|")[2] == shape:
                used.add(key)
                taken = workgroups - int(config["gemm_wgs"])
                if taken:
                    plan.setdefault("sites", {}).setdefault(call.site, f"c3_sp comm_cus={taken}")
    return [f"{key}: no collective of the step is of this shape" for key in read if key not in used]
