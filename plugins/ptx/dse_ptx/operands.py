"""How many operands an instruction has (PTX ISA, section 9.7): the table of forms, by which each is checked once."""

from __future__ import annotations

from collections.abc import Mapping

from dse_ptx.program import Instruction
from dse_ptx.rows import UnreadError

# the least and the most operands, results and predicates counted
_Counts = tuple[int, int]


def _forms(count: int, names: str, most: int | None = None) -> dict[str, Mapping[str, _Counts]]:
    return {name: {"": (count, count if most is None else most)} for name in names.split()}


# fmt: off
FORMS: Mapping[str, Mapping[str, _Counts]] = {
    **_forms(0, "ret exit trap brkpt membar fence griddepcontrol"),
    **_forms(1, "bra activemask nanosleep setmaxnreg pmevent"),
    **_forms(2, "mov abs neg not cnot testp brev popc clz bfind rcp sqrt rsqrt ex2 lg2 sin cos tanh cvt cvta ldmatrix"),
    **_forms(3, "add sub mul div rem min max and or xor shl shr copysign redux match"),
    **_forms(4, "mad fma sad selp slct bfe prmt shf dp4a mma"),
    **_forms(5, "lop3 bfi"),
    **_forms(3, "setp set", most=4),  # a predicate that is combined with
    **_forms(2, "ld ldu st", most=3),  # a policy of the cache
    **_forms(1, "prefetch prefetchu discard createpolicy", most=4),
    "atom": {"": (3, 4), "cas": (4, 5)},
    "red": {"": (2, 3)},
    "cp": {
        "": (3, 5), "commit_group": (0, 0), "wait_all": (0, 0), "wait_group": (1, 1),
        "prefetch": (1, 3), "bulk": (2, 6), "mbarrier": (1, 1),
    },
    "wgmma": {"": (7, 8), "fence": (0, 0), "commit_group": (0, 0), "wait_group": (1, 1)},
    "mbarrier": {
        "": (2, 2), "inval": (1, 1), "arrive": (2, 3), "arrive_drop": (2, 3), "test_wait": (3, 3), "try_wait": (3, 4),
    },
    **_forms(2, "elect getctarank"),
    **_forms(3, "mapa"),
    "shfl": {"": (4, 4), "sync": (5, 5)},
    "vote": {"": (2, 2), "sync": (3, 3)},
    "bar": {"": (1, 2)},
    "barrier": {"": (1, 2), "cluster": (0, 0)},
}
# fmt: on
"""Instruction -> modifier that decides ("": any other) -> the least and the most operands."""


def check_operands(instruction: Instruction) -> None:
    """Check the number of operands of an instruction that is known. Raises UnreadError."""
    forms = FORMS[instruction.name]
    # the first modifier with a form of its own decides, such as `cas` of `atom`
    least, most = next((counts for word, counts in forms.items() if word in instruction.modifiers), forms[""])
    if instruction.name == "cvt" and _packs(instruction):
        # two sources: the first becomes the upper half
        least = most = 3
    count = len(instruction.operands)
    if not least <= count <= most:
        named = f"{least}" if least == most else f"{least} to {most}"
        raise UnreadError(f"it has {count} operands, and {instruction.opcode} has {named}")


def _packs(instruction: Instruction) -> bool:
    """Tell whether a conversion puts two numbers into one register."""
    types = instruction.types
    return len(types) == 2 and types[0].endswith("x2") and not types[1].endswith("x2")
