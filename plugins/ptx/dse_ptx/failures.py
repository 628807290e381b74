"""Sentences of launches that fail while they run, by the status of the interpreter."""

from __future__ import annotations

from dataclasses import dataclass

from dse_ptx import vm


@dataclass(frozen=True)
class Failure:
    """What is known of a failure. thread, block: coordinates; value: an address or number; arrivals, bytes: that lack.

    most: warp instructions of the launch, at most; ranks: blocks of a cluster.
    """

    status: int
    thread: tuple[int, int, int]
    block: tuple[int, int, int]
    value: int
    arrivals: int
    size: int
    most: int
    ranks: int

    @property
    def sentence(self) -> str:
        """What went wrong, by which thread."""
        who, at = f"thread {self.thread} of block {self.block}", f"0x{self.value:x}"
        lacking = f"{self.arrivals} arrivals and {self.size} bytes have not come"
        ranks = f"the cluster has {self.ranks} blocks"
        sentences = {
            vm.OUT_OF_BOUNDS: f"{who} accesses {at}, which is out of bounds",
            vm.MISALIGNED: f"{who} accesses {at}, which is not a multiple of the access's size",
            vm.DEADLOCK: f"{who} waits at a barrier to which other warps never come (deadlock)",
            vm.DIVERGENT: f"a barrier is reached without {who}, which has not ended (deadlock)",
            vm.NOT_ALIGNED: f"it needs all threads of a warp, and {who}, which has not ended, is not there (deadlock)",
            vm.ENDLESS: f"{self.most} warp instructions were executed, and the kernel has not ended",
            vm.TRAPPED: f"{who} executes a trap",
            vm.DEEP: f"{who} diverges more deeply than the kernel has branches",
            vm.NO_MBARRIER: f"{who} uses {at}, where no mbarrier.init has made an mbarrier",
            vm.BAD_COUNT: f"{who} gives the mbarrier at {at} a count of {self.size}: counts are 1 to 2^20 - 1",
            vm.TOO_MANY: f"{who} lets more arrive at the mbarrier at {at}, or more bytes, than its phase expects",
            vm.DEADLOCK_MBARRIER: f"{who} waits for the mbarrier at {at}, whose phase never ends: {lacking} (deadlock)",
            vm.DEADLOCK_CLUSTER: f"{who} waits at the barrier of its cluster, to which others never come (deadlock)",
            vm.UNMATCHED: f"{who} arrives twice at the barrier of its cluster, or waits there without an arrival",
            vm.BAD_RANK: f"{who} names block {self.value} of its cluster, and {ranks}",
            vm.GONE_BLOCK: f"{who} accesses {at} of a block of its cluster that has ended",
            vm.BAD_DESCRIPTOR: f"{who} has a descriptor that leads to {at}, which is not in the block's shared memory",
            vm.BASE_OFFSET: f"{who} has a descriptor with a base offset, which is not executed: align its tile",
            vm.NO_GROUP: f"{who} is of a block whose warps are no multiple of the four of a warpgroup",
            vm.BAD_SIZE: f"{who} copies {self.value} bytes, and bulk copies move a multiple of 16",
            vm.MISALIGNED_BULK: f"{who} copies at {at}: pieces lie at multiples of 16 bytes, boxes of 128 there",
            vm.NO_MAP: f"{who} finds no tensor map of that many dimensions at {at}, a multiple of 64",
            vm.OTHER_BLOCK: f"{who} copies to a block without the copy's mbarrier, or names blocks beyond: {ranks}",
        }
        return sentences[self.status]
