"""Questions that an assistant may ask: their words, checked, and the command line that each stands for.

A question is data. Its names are of options that are shipped, or that lie in the folder of the server; its settings are
dotted paths with numbers, choices and ranges; its files lie below the folder of the server. What could run code, write
elsewhere, open a port or reach a network is not among them, and is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from dse.errors import ConfigError, Problem
from dse.values import Frozen

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}$")]
"""Name of an option; no path."""
File = Annotated[str, StringConstraints(min_length=1, max_length=300)]
"""Path of a file below the folder of the server."""
Scalar = Annotated[str, StringConstraints(max_length=500)] | float | bool
_KEY = re.compile(r"\+?[a-z_]\w*(\.\w+){0,11}")
_TEXT = re.compile(r"[\w .,+*()%:\[\]{}'-]*")
_REFUSED = ("hydra", "output_dir", "config_dir", "store", "tracking", "executor", "simulator", "study", "figures")
"""First words of paths that say where a run writes, what it starts, or which module answers."""


class Gemm(Frozen):
    """A GEMM of m rows, n columns and depth k, over all GPUs."""

    name: Name
    m: Annotated[int, Field(ge=1, le=2**31)]
    n: Annotated[int, Field(ge=1, le=2**31)]
    k: Annotated[int, Field(ge=1, le=2**31)]


class Question(Frozen):
    """What all questions have. VERB: words of the command. PATHS: field -> its word there, where that is another."""

    VERB: ClassVar[tuple[str, ...]] = ()
    PATHS: ClassVar[Mapping[str, str]] = {}

    def words(self, root: Path) -> list[str]:
        """Words of the command line after `python -m dse`. Raises ConfigError for a setting that is refused."""
        names = sorted(type(self).model_fields, key=lambda name: name == "settings")  # as they would be typed
        return [*self.VERB, *(word for name in names for word in self._of_field(name, root))]

    def _of_field(self, name: str, root: Path) -> Iterator[str]:
        value = getattr(self, name)
        if value is None:
            return
        path = self.PATHS.get(name, name)
        if name == "settings":
            yield from (_setting(key, of) for key, of in value.items())
        elif name == "gemms":
            if value:
                shapes = ", ".join(f"{{name: {gemm.name}, m: {gemm.m}, n: {gemm.n}, k: {gemm.k}}}" for gemm in value)
                yield f"workload.shapes=[{shapes}]"
        elif name.startswith("file"):
            yield f"{path}={_inside(value, root)}" if path else str(_inside(value, root))
        else:
            yield f"{path}={_text(value)}" if path else _text(value)


class Settable(Question):
    """A question on what settings may change: values by dotted path, as on the command line: `400 W`, `choice(1,2)`."""

    settings: Annotated[dict[str, Scalar], Field(max_length=50)] = Field(default_factory=dict)


class OfModel(Settable):
    """A question on a model and a machine: `machine options` names both."""

    model: Name
    system: Name = "h100_8"


class Plan(OfModel):
    """How a model's step should be parallelised and overlapped, what it takes, and how sure that is.

    gpus: of all nodes, for which degrees of parallelism are chosen; None: those of one node, tensor parallel.
    """

    VERB = ("plan",)
    PATHS: ClassVar[Mapping[str, str]] = {
        "mode": "run.mode",
        "batch": "run.batch",
        "sequence_length": "run.sequence_length",
        "gpus": "layouts.gpus",
    }

    mode: Literal["training", "prefill", "decode"] | None = None
    batch: Annotated[int, Field(ge=1, le=10**6)] | None = None
    sequence_length: Annotated[int, Field(ge=1, le=10**8)] | None = None
    gpus: Annotated[int, Field(ge=1, le=10**6)] | None = None

    def words(self, root: Path) -> list[str]:
        """As of a question; degrees are chosen where GPUs are given."""
        return [*super().words(root), *(["parallel=auto"] if self.gpus is not None else [])]


class ServePlan(OfModel):
    """Which engines serve a model within a latency with the most tokens a GPU and a dollar.

    ttft_s: most time to the first token [s]. tpot_s: most time of a later one [s].
    """

    VERB = ("serve-plan",)
    PATHS: ClassVar[Mapping[str, str]] = {"ttft_s": "slo.ttft_s", "tpot_s": "slo.tpot_s"}

    ttft_s: Annotated[float, Field(gt=0, le=1e5)] | None = None
    tpot_s: Annotated[float, Field(gt=0, le=1e5)] | None = None


class OverlapOfGemms(Settable):
    """Which overlap of a GEMM and its all-gather wins on a machine, of given GEMMs or of FiCCO's sixteen."""

    VERB = ("run", "ficco_sweep")

    system: Name = "mi300x_8"
    gemms: Annotated[tuple[Gemm, ...], Field(max_length=64)] = ()


class Beside(Settable):
    """How a collective should run beside a GEMM that does not wait for it: kernels, reserved CUs or DMA engines."""

    VERB = ("run", "conccl")

    system: Name = "mi300x_8"


class Power(Settable):
    """Which overlap wins under which limit of the board's power, and for how many joules."""

    VERB = ("run", "power")

    system: Name = "a100_8"


class Codesign(Settable):
    """Which machine is best for workloads within a budget of area and power, and what each feature is worth."""

    VERB = ("codesign",)
    PATHS: ClassVar[Mapping[str, str]] = {"area_mm2": "budget.area_mm2", "power_w": "budget.power_w"}

    area_mm2: Annotated[float, Field(gt=0, le=1e5)] | None = None
    power_w: Annotated[float, Field(gt=0, le=1e6)] | None = None


class Libraries(Question):
    """Which software runs a collective the fastest inside a node, what it holds, and why others do not run."""

    VERB = ("machine", "libraries")

    pattern: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    system: Name = "h100_8"
    gpus: Annotated[int, Field(ge=2, le=1024)] | None = None


class Machine(Question):
    """Every constant of a machine with its source."""

    VERB = ("machine", "show")
    PATHS: ClassVar[Mapping[str, str]] = {"system": ""}

    system: Name


class Options(Question):
    """Names of what can be asked for: machines, models, schedules, studies, implementations, workloads."""

    PATHS: ClassVar[Mapping[str, str]] = {"kind": ""}

    kind: Literal["systems", "models", "schedules", "studies", "implementations", "workloads"]


class Profile(Question):
    """What a recorded run hid, and what its kernels waited for. system: where the profile names no GPU."""

    VERB = ("profile", "import")
    PATHS: ClassVar[Mapping[str, str]] = {"file": "profile"}

    file: File
    system: Name | None = None


class Advice(Profile):
    """Which changes of collectives would shorten a recorded run, by how much, and how sure that is."""

    VERB = ("profile", "advise")


class Difference(Question):
    """Why one recorded run is slower than another, cause by cause."""

    VERB = ("profile", "explain")
    PATHS: ClassVar[Mapping[str, str]] = {"file_before": "", "file_after": ""}

    file_before: File
    file_after: File


class Claims(Question):
    """What a paper published against what the newest run of its study found."""

    VERB = ("results", "claims")

    study: Name


TOOLS: dict[str, type[Question]] = {
    "plan": Plan,
    "serve_plan": ServePlan,
    "overlap_of_gemms": OverlapOfGemms,
    "collective_beside_gemm": Beside,
    "power_limits": Power,
    "codesign": Codesign,
    "collective_libraries": Libraries,
    "machine": Machine,
    "options": Options,
    "profile": Profile,
    "profile_advice": Advice,
    "profile_difference": Difference,
    "claims": Claims,
}
"""Name of a tool -> the question that it takes."""


def _setting(key: str, value: Any) -> str:
    """A word `path=value`. Raises ConfigError for a path or a value that a question may not have."""
    if not _KEY.fullmatch(key):
        raise ConfigError(
            [Problem(f"settings.{key[:80]}", "is no dotted path", way_out="write run.batch, for example")]
        )
    first = key.lstrip("+").removeprefix("space.").partition(".")[0]
    if first in _REFUSED:
        rule = "says where a run writes, what it starts or who answers, which a question may not"
        raise ConfigError([Problem(f"settings.{key}", rule, way_out="leave it out, or use the command line")])
    return f"{key}={_text(value, key)}"


def _text(value: Any, key: str = "") -> str:
    """A value as the command line has it. Raises ConfigError for text that is more than a value."""
    if isinstance(value, bool):
        return str(value).lower()
    text = f"{value:.17g}" if isinstance(value, float) and not value.is_integer() else str(value)
    text = str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else text
    if not _TEXT.fullmatch(text) or ".." in text:
        rule = "is no number, name, choice, range or unit"
        raise ConfigError([Problem(f"settings.{key}", rule, text[:80], "write 8, 400 W or choice(1,2)")])
    return text


def _inside(file: str, root: Path) -> Path:
    """The path of a file relative to the folder of the server. Raises ConfigError for one elsewhere, or for none."""
    try:
        place = (root / file).resolve()
        exists = place.is_file()
    except (OSError, ValueError):  # NUL, or too long
        place, exists = root, False
    if not place.is_relative_to(root.resolve()):
        way = "put it there, or start the server with root=<its folder>"
        raise ConfigError([Problem("file", "is outside the folder of this server", file[:200], way)])
    if not exists:
        raise ConfigError([Problem("file", "is no file in the folder of this server", file[:200], "check its name")])
    return place.relative_to(root.resolve())


def command_text(words: Sequence[str]) -> str:
    """The command line of words, as a shell takes it."""
    import shlex

    return shlex.join(["python", "-m", "dse", *words])
