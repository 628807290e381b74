"""Memory of the ranks of a group that every rank can store into, with flags that say what has arrived."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Inbox:
    """A buffer of this rank, `local`, and where the ranks' buffers are: addresses [ranks] in this rank's terms.

    flags: int32 [2, ranks], of two phases, by sender; flag_addresses: of the ranks' flags.
    """

    local: Tensor
    addresses: Tensor
    flags: Tensor
    flag_addresses: Tensor


class Peers:
    """Inboxes of a group by name.

    Two of each take turns: a rank is at most one call ahead of another, since a call ends when all ranks have sent.
    """

    def __init__(self, group: str, device: torch.device) -> None:
        """group: its name. Raises ValueError for one that is not there."""
        self._name, self.device = group, device
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._inboxes: dict[tuple[str, int, torch.dtype, int], Inbox] = {}
        self._calls: dict[str, int] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, found by its name each time: a group that is held on to outlives `destroy_process_group`."""
        try:
            group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(self._name)
        except (RuntimeError, ValueError, LookupError) as error:
            raise ValueError(f"{self._name!r} is no process group here: pass group.group_name") from error
        return group

    def begin(self, name: str, elements: int, dtype: torch.dtype) -> tuple[Inbox, int]:
        """The inbox of a call of an operator, of at least so many elements, and the number that its flags count to."""
        # flags count calls and are never reset: an older value means not yet
        calls = self._calls[name] = self._calls.get(name, 0) + 1
        # the parity is the turn
        key = (name, elements, dtype, calls % 2)
        if key not in self._inboxes:
            local, addresses = self._shared(elements, dtype)
            flags, flag_addresses = self._shared(2 * self.ranks, torch.int32)
            self._inboxes[key] = Inbox(local, addresses, flags, flag_addresses)
        return self._inboxes[key], calls

    def _shared(self, elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Zeros in memory that all ranks can reach, and the addresses of all ranks' copies. All ranks call it."""
        if self.device.type == "cuda":
            return self._symmetric(elements, dtype)
        count = max(1, elements)
        # the folder of shared memory, else any: mapped files are shared as well
        place = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
        handle, path = tempfile.mkstemp(prefix="dse_fused_", dir=place)
        os.ftruncate(handle, count * dtype.itemsize)
        os.close(handle)
        paths: list[Any] = [None] * self.ranks
        dist.all_gather_object(paths, path, group=self.group)
        # a fresh file reads as zeros
        tensors = [torch.from_file(each, shared=True, size=count, dtype=dtype) for each in paths]
        dist.barrier(group=self.group)  # all have it
        # mappings keep the memory; without a name nothing is left over when a rank is killed
        Path(path).unlink()
        _KEPT.extend(tensors)
        addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
        return tensors[self.rank], addresses

    def _symmetric(self, elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        from torch.distributed import _symmetric_memory as symmetric

        local = symmetric.empty(max(1, elements), dtype=dtype, device=self.device).zero_()
        handle = symmetric.rendezvous(local, group=self.group)
        addresses = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=self.device)
        # no peer stores into memory that is not yet zeroed
        handle.barrier(channel=0)
        return local, addresses


_KEPT: list[Tensor] = []  # whose memory kernels reach by address only
_PEERS: dict[tuple[str, torch.device], Peers] = {}


def peers_of(group: str, device: torch.device) -> Peers:
    """The peers of a group by its name (`group.group_name`). Raises ValueError for one that is not there."""
    key = (group, device)
    if key not in _PEERS:
        _PEERS[key] = Peers(group, device)
    return _PEERS[key]
