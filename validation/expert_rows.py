"""Measured dispatch and combine of expert parallelism: rows of other projects' tables, and constants fitted to some.

Tables are told by their columns.

- DeepEP by SMs (ai-dynamo/aiconfigurator): device, node_num, hidden_size, num_token (of a rank), num_topk, num_experts,
  and for dispatch (fp8 with a scale for 128) and combine (bf16) SMs and times in us, transmission and notification,
  which are added. A node is of 8 GPUs; of 4 on GB200 (a tray: with 4, times over top-k come out, with 8 they do not)
- MORI (ROCm/mori): gpu, kernel, ep, phase, dtype, num_tokens, hidden_dim (of fp4 pairs), block_num, latency_us, topk
  (blank: 8, as bytes over times say), 32 experts on a GPU. Rows that repeat another one (the tuner copies those of bf16
  for kinds that it does not have) count once. A combine that casts to fp8 and copies sends bytes, on MI355X alone
- over EFA (awslabs/awsome-distributed-ai): gpu, gpus, tokens_per_rank, hidden, top_k, experts, operation, backend and
  gb_per_s, of bytes to all of a token's nodes by DeepEP's normal kernels; other backends and modes have no constants
- published: source, gpu, ep, phase, tokens, hidden, topk, dtype, sms, bandwidth_GBps (of bytes to all GPUs inside a
  node, by RDMA to all of a token's nodes) or latency_us. Judged, never fitted on

Rows to fit on: few, many and a middle number of tokens of a few shapes, by a few numbers of SMs. `python -m
benchmarks.expert_exchanges --data DIR --fit` prints the constants as `conf/node` has them.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from simulators.costs.expert_exchange import Direction, RoutedTokens, kernel_seconds
from simulators.hardware.machine import merged
from simulators.hardware.network import Node, TokenKernel, TokenKernelKind
from simulators.workloads.model_zoo import option_tree

Floats = NDArray[np.float64]
DIRECTIONS: tuple[Direction, ...] = ("dispatch", "combine")
Table = Literal["deepep", "mori", "published", "efa"]

NODES: Mapping[str, str] = {
    "h100_sxm": "h100_switch_8",
    "gb200": "b200_switch_8",
    "mi300x": "mi300x_mesh_8",
    "mi355x": "mi355x_mesh_8",
    "H800": "h800_switch_8",
    "H100 over EFA": "h100_switch_8",
}
"""Device of the tables -> option of `node` that has its constants."""
_FABRICS = {"H100 over EFA": "efa400"}
"""Device -> network that joins its nodes, where it is not the one that its constants were fitted on."""
_GPUS_PER_NODE = {"gb200": 4}  # 8 elsewhere
_KINDS: Mapping[str, TokenKernelKind] = {
    "IntraNode": "node",
    "IntraNodeLL": "node",
    "InterNodeV1": "network",
    "InterNodeV1LL": "network_low_latency",
}
_SCALED = 1 + 4 / 128  # bytes of an element of fp8, with a scale of 4 bytes for 128
_FITTED_SMS = (4, 12, 24)  # few, a middle number and many of those measured
_FITTED_SHAPES = {(7168, 8, 256), (2048, 8, 128), (4096, 2, 8), (4096, 22, 512)}  # hidden, top-k, experts
_FITTED_TOKENS: Mapping[str, tuple[int, ...]] = {"deepep": (64, 1024, 16384), "mori": (8, 64, 512, 4096)}


@dataclass(frozen=True)
class KernelRow:
    """One measured kernel. seconds: its time; bytes_per_s: of `published` bandwidths, in place of it."""

    table: Table
    device: str
    kind: TokenKernelKind
    direction: Direction
    name: str
    routed: RoutedTokens
    num_sms: float
    seconds: float
    bytes_per_s: float = 0.0

    @property
    def group(self) -> str:
        """Kernel and direction, as constants are fitted for."""
        return f"{self.kind} {self.direction}"


_LAYOUTS: Mapping[str, Table] = {
    "dispatch_sms": "deepep",
    "block_num": "mori",
    "bandwidth_GBps": "published",
    "tokens_per_rank": "efa",
}
"""Column by which a table is told."""


def table_of(path: Path) -> Table | None:
    """Layout of a table; None for one of other columns."""
    # comments name the source
    columns = next(_cells(path), {}).keys()
    return next((table for column, table in _LAYOUTS.items() if column in columns), None)


def _cells(path: Path) -> Iterator[dict[str, str]]:
    return csv.DictReader(line for line in path.read_text("utf-8").splitlines() if not line.startswith("#"))


def read_rows(path: Path) -> list[KernelRow]:
    """Rows of a table; of a table of other columns none. Rows that repeat another one count once."""
    readers = {"deepep": _deepep, "mori": _mori, "published": _published, "efa": _over_efa}
    layout = table_of(path)
    rows = [] if layout is None else [row for cell in _cells(path) for row in readers[layout](cell)]
    # the tuner of MORI copies rows of one kind to others
    return list({_identity(row): row for row in rows}.values()) if layout == "mori" else rows


def count_unread(path: Path) -> int:
    """Lines of a table of which no row is read: low-latency modes, kernels that are unknown here, repetitions."""
    lines = sum(1 for _ in _cells(path))
    return lines - len(read_rows(path)) // (len(DIRECTIONS) if table_of(path) == "deepep" else 1)


def _identity(row: KernelRow) -> tuple[Any, ...]:
    routed = row.routed
    return (row.device, row.group, row.seconds, *vars(routed).values())


def _deepep(cell: Mapping[str, str]) -> Iterator[KernelRow]:
    hidden, tokens, per_token, experts = (
        int(cell[name]) for name in ("hidden_size", "num_token", "num_topk", "num_experts")
    )
    nodes, device = int(cell["node_num"]), cell["device"]
    gpus = nodes * _GPUS_PER_NODE.get(device, 8)
    for direction, element in zip(DIRECTIONS, (_SCALED, 2.0), strict=True):
        micros = float(cell[f"{direction}_transmit_us"]) + float(cell[f"{direction}_notify_us"])
        sms = int(cell[f"{direction}_sms"])
        name = f"{hidden} top {per_token} of {experts}, {tokens} tokens, {sms} SMs"
        routed = RoutedTokens(tokens, element * hidden, experts, per_token, gpus, nodes)
        kind: TokenKernelKind = "network" if nodes > 1 else "node"
        yield KernelRow("deepep", device, kind, direction, name, routed, sms, micros * 1e-6)


def _mori(cell: Mapping[str, str]) -> Iterator[KernelRow]:
    kind, gpus, phase = _KINDS.get(cell["kernel"]), int(cell["ep"]), cell["phase"]
    if kind is None:
        return
    per_token, tokens, hidden = int(float(cell["topk"] or 8)), int(cell["num_tokens"]), int(cell["hidden_dim"])
    # only there do the bytes over times say that fp8 is sent
    cast = cell["quant_type"] == "fp8_direct_cast" and cell["zero_copy"] == "False" and cell["gpu"] == "mi355x"
    element = 2.0 if cell["dtype"] == "bf16" and not cast else 1.0
    # share of the links of a node of 8 that lead to GPUs of the group
    nodes, share = max(1, gpus // 8), min(1.0, (gpus - 1) / 7)
    routed = RoutedTokens(tokens, element * hidden, 32 * gpus, per_token, gpus, nodes, share)
    copied = " cast" * cast + " zero copy" * (cell["zero_copy"] == "True")
    name = f"{cell['kernel']} {cell['dtype']}{copied}, ep {gpus}, top {per_token}, {tokens} tokens"
    direction: Direction = "dispatch" if phase == "dispatch" else "combine"
    yield KernelRow(
        "mori", cell["gpu"], kind, direction, name, routed, int(cell["block_num"]), float(cell["latency_us"]) * 1e-6
    )


def _published(cell: Mapping[str, str]) -> Iterator[KernelRow]:
    """Bandwidths of normal kernels; those of low-latency kernels are of a mode that has no constants."""
    if not cell["sms"]:
        return  # low-latency kernels
    gpus, direction = int(cell["ep"]), cell["phase"]
    element = _SCALED if cell["dtype"] == "fp8" else 2.0
    nodes, tokens, token_bytes = max(1, gpus // 8), int(cell["tokens"]), element * int(cell["hidden"])
    groups = (nodes, min(nodes, 4))  # top 4 groups, says their README, a group a node
    routed = RoutedTokens(tokens, token_bytes, 256, int(cell["topk"]), gpus, nodes, groups=groups)
    name = f"{direction}, ep {gpus}, {cell['tokens']} tokens"
    kind: TokenKernelKind = "network" if gpus > 8 else "node"
    rate = float(cell["bandwidth_GBps"]) * 1e9
    way: Direction = "dispatch" if direction == "dispatch" else "combine"
    yield KernelRow("published", cell["gpu"], kind, way, name, routed, int(cell["sms"]), 0.0, rate)


def _over_efa(cell: Mapping[str, str]) -> Iterator[KernelRow]:
    """Rates of DeepEP's normal kernels, which take as many SMs as the library does where a row does not say."""
    way = next((way for way in DIRECTIONS if way == cell["operation"]), None)
    if way is None or not cell["backend"].startswith("DeepEP") or not cell["note"].startswith("normal"):
        return
    gpus, tokens, device = int(cell["gpus"]), int(cell["tokens_per_rank"]), f"{cell['gpu']} over EFA"
    if (node := node_of(device) if device in NODES else None) is None or node.experts is None:
        return
    element = _SCALED if cell["dispatch_dtype"] == "fp8" and way == "dispatch" else 2.0
    nodes, experts, per_token = gpus // node.num_gpus, int(cell["experts"]), int(cell["top_k"])
    routed = RoutedTokens(
        tokens, element * int(cell["hidden"]), experts, per_token, gpus, nodes, groups=(nodes, min(nodes, 4))
    )
    name, rate = f"{way}, {gpus} GPUs, {tokens} tokens", float(cell["gb_per_s"]) * 1e9
    yield KernelRow("efa", device, "network", way, name, routed, node.experts.num_sms, 0.0, rate)


def is_fitted(row: KernelRow) -> bool:
    """Tell whether constants are fitted on a row (see the module)."""
    routed: Any = row.routed
    if is_fitted_by_nodes(row):
        return True
    if row.table in ("published", "efa") or routed.tokens not in _FITTED_TOKENS[row.table]:
        return False
    if row.table == "mori":
        return int(routed.gpus) in (8, 16) and int(routed.per_token) in (8, 16)
    shape = (int(row.name.split()[0]), routed.per_token, routed.experts)
    of_nodes = {1: _FITTED_SMS, 2: (4, 8, 16, 24)}  # nothing is fitted on more nodes
    return shape in _FITTED_SHAPES and row.num_sms in of_nodes.get(int(routed.nodes), ())


def predict(kernel: TokenKernel, row: KernelRow, node: Node) -> float:
    """Time [s] of a row by constants of its kernel and direction."""
    inside: Any = np.minimum(np.asarray(row.routed.gpus), node.num_gpus)
    share = node.link_share(inside)
    routed = RoutedTokens(**{**vars(row.routed), "link_share": share})
    return float(kernel_seconds(kernel, routed, num_sms=row.num_sms))


_BOUNDS: Mapping[str, tuple[float, float, float]] = {  # least, typical, most
    "launch_s": (1e-6, 3e-5, 1e-3),
    "sm_launch_s": (1e-9, 1e-5, 1e-2),
    "token_s": (1e-10, 1e-7, 1e-5),
    "copy_s": (1e-10, 3e-8, 1e-5),
    "passes": (0.1, 1.0, 30.0),
    "bytes_per_s_per_sm": (1e8, 2e10, 1e12),
    "bytes_per_s": (1e9, 3e11, 1e13),
}


def fit(rows: Sequence[KernelRow], node: Node) -> TokenKernel:
    """Constants of one kernel and direction from rows, robustly on the logarithms, with weak priors."""
    from scipy.optimize import least_squares

    # constants are positive, and span decades
    low, typical, high = (np.log([bounds[place] for bounds in _BOUNDS.values()]) for place in range(3))
    nic = None if node.experts is None else node.experts.nic_bytes_per_s
    if nic is not None and rows[0].kind != "node":  # the rate across nodes is that of a port at most
        high[-1], typical[-1] = np.log(nic), np.log(0.9 * nic)
    times = np.log([row.seconds for row in rows])
    weight = 0.01  # of a prior: a factor of e away from what is typical counts as 1 % of one row

    def residuals(logs: Floats) -> Floats:
        kernel = _kernel(logs)
        errors = np.log([predict(kernel, row, node) for row in rows]) - times
        return np.concatenate([errors, weight * (logs - typical)])

    # a few odd rows must not decide
    best = least_squares(residuals, typical, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    return _kernel(best.x)


def is_fitted_by_nodes(row: KernelRow) -> bool:
    """Tell whether `node_s` and `incast_nodes` are fitted on a row: by 20 SMs, few tokens on four nodes and on eight,
    and many on eight.
    """
    shapes = {(4, 64), (8, 64), (8, 4096)}
    return row.table == "deepep" and row.num_sms == 20 and (row.routed.nodes, row.routed.tokens) in shapes


def fit_nodes(rows: Sequence[KernelRow], kernel: TokenKernel, node: Node) -> TokenKernel:
    """Time for each node and incast of a kernel whose other constants stand, from rows on several numbers of nodes."""
    from scipy.optimize import least_squares

    def of(logs: Floats) -> TokenKernel:
        node_s, incast = (float(value) for value in np.exp(logs))
        return kernel.model_copy(update={"node_s": node_s, "incast_nodes": incast})

    best = least_squares(
        lambda logs: [np.log(predict(of(logs), row, node) / row.seconds) for row in rows], np.log([2e-5, 3.0])
    )
    return of(best.x)


def _kernel(logs: Floats) -> TokenKernel:
    return TokenKernel(**{name: float(value) for name, value in zip(_BOUNDS, np.exp(logs), strict=True)})


@functools.cache
def node_of(device: str) -> Node:
    """The node that has the constants of a device of the tables."""
    tree = option_tree("node", NODES[device])
    if (fabric := _FABRICS.get(device)) is not None:
        tree = merged(tree, option_tree("fabric", fabric)["node"])
    return Node.model_validate(tree)


def constants_of(row: KernelRow, node: Node) -> TokenKernel | None:
    """Constants that a node has for the kernel of a row."""
    library = node.exchange() if row.device in _FABRICS else node.experts
    kernels = {} if library is None else {str(kind): kernel for kind, kernel in library.kernels.items()}
    kernel = kernels.get(row.kind)
    return None if kernel is None else getattr(kernel, row.direction)


def error_of(kernel: TokenKernel, row: KernelRow, node: Node) -> float:
    """Predicted over measured time, less 1; of a published bandwidth, bytes over predicted time tell the time."""
    predicted = predict(kernel, row, node)
    if not row.bytes_per_s:  # a published bandwidth
        return predicted / row.seconds - 1
    routed: Any = row.routed
    places = routed.remote_nodes * routed.nodes / np.maximum(routed.nodes - 1, 1)  # its own node is counted there
    places = routed.copies if routed.nodes == 1 else places
    moved = float(routed.tokens * routed.token_bytes * places)
    return predicted / (moved / row.bytes_per_s) - 1


def fit_all(rows: Iterable[KernelRow], node: Node) -> Mapping[str, tuple[TokenKernel, tuple[str, ...]]]:
    """Kernel and direction -> constants and the names of the rows that they were fitted on.

    What several nodes add is fitted last, with all else as it is, on rows of its own, whose names are not among these.
    """
    by_group: dict[str, list[KernelRow]] = {}
    by_nodes: dict[str, list[KernelRow]] = {}
    for row in filter(is_fitted, rows):
        (by_nodes if is_fitted_by_nodes(row) else by_group).setdefault(row.group, []).append(row)
    fitted = {}
    for group, members in by_group.items():
        kernel = fit(members, node)
        kernel = fit_nodes(by_nodes[group], kernel, node) if group in by_nodes else kernel
        fitted[group] = kernel, tuple(dict.fromkeys(row.name for row in members))
    return fitted
