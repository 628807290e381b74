"""Kernels of products of matrices, as text."""

from __future__ import annotations

import functools

from dse_ptx.tiles.consumer import Consumer
from dse_ptx.tiles.producer import Producer
from dse_ptx.tiles.ring import Ring
from dse_ptx.tiles.shape import ProductKernel
from dse_ptx.tiles.text import Text

NAME = "product"
"""Of the kernel in its module."""


@functools.cache
def product_text(of: ProductKernel) -> str:
    """The module of a product. Its parameters: maps of A, B and C (which stays unused where C is stored by threads),
    C, bias (or 0), columns of C, steps of k of a block, tiles along m and n, and rows of tiles filled together.
    """
    parameters = {"a": "map", "b": "map", "c": "map", "out": "u64", "bias": "u64"}
    parameters |= dict.fromkeys(("n", "steps", "tiles_m", "tiles_n", "group"), "u32")
    text = Text(NAME, parameters, of.blocks_of_cluster, of.threads)
    targets, consume, end = of.cluster[0] + of.cluster[1] - 1, text.mark(), text.mark()
    full = {of.barriers_at + 8 * stage: 1 for stage in range(of.stages)}
    empty = {of.barriers_at + 8 * (of.stages + stage): 4 * of.consumers * targets for stage in range(of.stages)}
    text.begin_barriers(full | empty)
    ring = Ring(of, text)
    text.op("bra", consume, guard=text.equals(ring.group, 0, "ne.u32"))
    Producer(ring).write(end)
    text.op("bra", end)
    text.place(consume)
    Consumer(ring).write()
    text.place(end)
    if of.blocks_of_cluster:
        text.meet()  # no block ends while others copy to it, arrive at it, or read it
    return text.render()
