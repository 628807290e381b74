"""All-reduces of a step by the kernels that vLLM and SGLang have of their own: where they pay, and up to which size.

Both give short sums of tp to kernels of their own, and to quick reduce on MI300. Which sizes a kernel takes is a
constant of their code for most of them; switches are those of `conf/data/framework_settings.yaml`. Times are those of
`python -m dse machine libraries` (`simulators.costs.other_software`). A switch is written where a kernel is surely
faster than what the plan has, by 90 % of measured ratios of that GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dse.results.words import cell
from dse.values.units import with_prefix
from dse_deploy.step_calls import Call
from simulators.costs.collective import library_cost
from simulators.costs.other_software import Replacement, ratio_gpus, replacements

_CUSTOM = ("custom_one_shot", "custom_two_shot", "aiter_custom")
"""Kernels that `disable-custom-all-reduce` turns off."""
_SYMMETRIC = "nccl_symmetric"
_SYMMETRIC_GPUS = 4  # min_world_size in vllm/distributed/device_communicators/all_reduce_utils.py of vllm-project/vllm
_QUICK = {
    "quick_reduce:fp16": "FP",
    "quick_reduce:fp8": "INT8",
    "quick_reduce:int6": "INT6",
    "quick_reduce:int4": "INT4",
}
"""Formats of quick reduce, and the words that vLLM and SGLang have for them."""
_MIB = 1 << 20
_SIZES = tuple(_MIB << place for place in range(12))  # to 2 GiB, which is the default limit of quick reduce


def sums_of_tp(calls: Sequence[Call]) -> list[Call]:
    """All-reduces over tp inside a node, one of each size."""
    sums = (call for call in calls if call.pattern == "all_reduce" and call.axis == "tp" and call.nodes == 1)
    return list({call.payload_bytes: call for call in sums}.values())


def without_custom_sums(calls: Sequence[Call], element: str) -> bool | None:
    """True where the library, or the switch, is surely faster at each size of custom kernels; None elsewhere."""
    sums = sums_of_tp(calls)
    taken = [of for call in sums for of in _replacements(call, element) if of.name in _CUSTOM]
    return True if taken and all(map(_is_measured, sums)) and all(of.ratios[0] > 1 for of in taken) else None


def symmetric_sums(calls: Sequence[Call], element: str) -> bool | None:
    """True where NCCL's symmetric memory is the fastest for each sum of a step, and surely so; None elsewhere.

    None also among fewer GPUs than vLLM gives it (`NCCL_SYMM_MEM_ALL_REDUCE_CONFIG`).
    """
    sums = sums_of_tp(calls)
    if any(call.ranks < _SYMMETRIC_GPUS for call in sums):
        return None
    fastest = [next(iter(_replacements(call, element)), None) for call in sums]
    is_faster = (of is not None and of.name == _SYMMETRIC and of.ratios[-1] < 1 for of in fastest)
    return True if sums and all(map(_is_measured, sums)) and all(is_faster) else None


def quick_reduce(calls: Sequence[Call], element: str) -> tuple[str, int] | None:
    """Format of quick reduce that sends what it is given, and the largest size [MiB] up to which it is the fastest.

    None where no sum of a step is surely faster by it.
    """
    for call in filter(_is_measured, sums_of_tp(calls)):
        fastest = next(iter(_replacements(call, element)), None)
        if fastest is None or fastest.name not in _QUICK or fastest.ratios[-1] >= 1:
            continue
        largest = max(
            size
            for size in (call.payload_bytes, *_SIZES)
            if (of := next(iter(_replacements(call, element, size)), None)) is not None
            and of.name == fastest.name
            and of.ratios[-1] < 1
        )
        return _QUICK[fastest.name], -(-largest // _MIB)
    return None


def sum_lines(calls: Sequence[Call], element: str, constants: Sequence[str]) -> Iterator[str]:
    """Yield what is faster than the plan's sums at the sizes of a step, where constants alone say who takes them.

    constants: names of these in the code of a tool.
    """
    for call in sums_of_tp(calls):
        fastest = next(iter(_replacements(call, element)), None)
        if constants and fastest is not None and fastest.seconds < fastest.library_s:
            size = with_prefix(call.payload_bytes, "byte")
            least, _, most = (cell(ratio * fastest.library_s, "s") for ratio in fastest.ratios)
            rests = f"{least} to {most} in 90 %, by measured times on {' and '.join(ratio_gpus())}"
            times = (
                f"{cell(fastest.seconds, 's')} by {fastest.name} ({rests}), {cell(fastest.library_s, 's')} as planned"
            )
            yield f"all-reduces of {size} take {times}; no switch has the sizes of {' and '.join(constants)}"


def _is_measured(call: Call) -> bool:
    """Tell whether ratios of times were measured on the GPU of a call."""
    return call.group.machine is not None and str(call.group.machine.gpu.name) in ratio_gpus()


def _replacements(call: Call, element: str, size: int | None = None) -> list[Replacement]:
    """Software that could sum in place of what the plan has, the fastest first. size: None for that of the call."""
    payload = float(call.payload_bytes if size is None else size)
    library_s = float(np.asarray(library_cost(call.pattern, payload, call.group, element_bytes=2).seconds))
    switched = call.in_switch_s(payload)
    planned_s = library_s if switched is None else min(library_s, switched)
    return replacements(call.pattern, payload, call.group, element=element, library_s=planned_s)
