"""Arguments of a kernel as the bytes of its parameter space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError, Problem
from dse_ptx.program import Parameter


@dataclass(frozen=True)
class Pointer:
    """The address of an allocation of a device."""

    address: int


Argument: TypeAlias = int | float | np.generic | NDArray[Any] | Pointer


def parameter_bytes(parameters: Sequence[Parameter], arguments: Sequence[Argument]) -> NDArray[np.uint8]:
    """Bytes of the parameter space. Raises ConfigError for arguments that do not fit."""
    if len(arguments) != len(parameters):
        rule = f"holds {len(arguments)} values where the kernel has {len(parameters)} parameters"
        raise ConfigError(
            [Problem("arguments", rule, way_out=", ".join(f".{p.type_name} {p.name}" for p in parameters))]
        )
    content = np.zeros(max((entry.offset + entry.size for entry in parameters), default=0), np.uint8)
    for parameter, argument in zip(parameters, arguments, strict=True):
        value = _argument_bytes(parameter, argument)
        content[parameter.offset : parameter.offset + parameter.size] = np.frombuffer(value, np.uint8)
    return content


def _argument_bytes(parameter: Parameter, argument: Argument) -> bytes:
    """Bytes of one argument: numbers in the type of the parameter. Raises ConfigError where they do not fit."""
    kind, bits = parameter.type_name, 8 * parameter.size
    # `2` may be typed for a float
    if isinstance(argument, int) and kind in ("f32", "f64"):
        argument = float(argument)
    if isinstance(argument, Pointer):
        value = argument.address.to_bytes(8, "little")
    elif isinstance(argument, np.ndarray | np.generic):
        value = argument.tobytes()
    elif isinstance(argument, float) and kind[0] in "us":
        rule, way = f"is no whole number, as .{kind} is", "write it without a point"
        raise ConfigError([Problem(f"arguments.{parameter.name}", rule, str(argument), way)])
    elif isinstance(argument, float):
        value = np.array(argument, {4: np.float32, 8: np.float64}.get(parameter.size, np.float16)).tobytes()
    # signed and unsigned values of as many bits
    elif not -(1 << bits - 1) <= argument < 1 << bits:
        raise ConfigError([Problem(f"arguments.{parameter.name}", f"is no number of {bits} bits", str(argument))])
    else:
        value = (argument % (1 << bits)).to_bytes(parameter.size, "little")
    if len(value) != parameter.size:
        rule = f"has {parameter.size} bytes, and is given {len(value)}"
        raise ConfigError([Problem(f"arguments.{parameter.name}", rule, str(argument))])
    return value
