"""The command `serve-plan`: the study of serving of one model on one system, within limits of latency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dse.config.compose import request
from dse.config.options import overrides, own_folder
from dse.errors import Problems, did_you_mean
from dse.results.run_folder import CommandAnswer
from dse.run_study import run
from dse.study.plan import plan
from dse_serving.design import Slo
from dse_serving.plan_file import words_of_plan

_LIMITED = ("ttft_s", "tpot_s")
_PLAN = "plan="
_RANDOM = ("poisson", "gamma", "bursts")
_COUNTS = {
    "traffic.concurrency": ("closed",),
    "traffic.rate_per_s": _RANDOM,
    "traffic.variation": ("gamma",),
    "traffic.burst": ("bursts",),
    "traffic.trace": ("trace",),
    "traffic.speed": ("trace",),
    **{
        f"traffic.{name}": ("closed", *_RANDOM) for name in ("requests", "input", "output", "mix", "prefix", "prefixes")
    },
}
"""Key of the traffic -> arrivals with which it counts."""
_REPLICAS = "+space.engines.replicas=choice(1,2,3,4,6,8)"


def serve_plan(words: Sequence[str]) -> CommandAnswer:
    """`serve-plan model= system= [plan=] [traffic.<key>=] [slo.ttft_s=] [slo.tpot_s=] [...]`: the study within limits.

    Raises ConfigError for limits that are none.
    """
    typed, check = overrides([word for word in words if not word.startswith(_PLAN)]), Problems()
    plans = [word.removeprefix(_PLAN) for word in words if word.startswith(_PLAN)]
    pairs = dict(word.split("=", 1) for word in typed if word.startswith("slo."))
    for path in pairs:
        if path.removeprefix("slo.") not in Slo.model_fields:
            way = did_you_mean(path, [f"slo.{name}" for name in Slo.model_fields])
            check.add(path, "is no limit", value=pairs[path], way_out=way)
    limits = {path.removeprefix("slo."): _value(text) for path, text in pairs.items()}
    known = {name: value for name, value in limits.items() if name in Slo.model_fields}  # others were noted
    slo = check.model(Slo, known, path="slo")
    arrivals = _arrivals(typed)
    for path, kinds in _COUNTS.items():
        if arrivals not in kinds and any(word.startswith((f"{path}=", f"{path}.")) for word in typed):
            way = f"write traffic.arrivals={kinds[0]}, or leave it out"
            check.add(path, f"does not count with traffic.arrivals={arrivals}", way_out=way)
    check.done()
    assert slo is not None
    high = {name: getattr(slo, name) for name in _LIMITED if getattr(slo, name) is not None}
    # limits of users are limits of the study, which choose the answer
    more = [f"+study.limits.{name}.high={value!r}" for name, value in high.items()]
    chosen = any(word.startswith(("engines.replicas=", "space.", "+space.")) for word in typed)
    more += [f"traffic.arrivals={arrivals}"] if arrivals == "trace" else []
    if arrivals != "closed" and not chosen:  # the rate is plans: how many engines is the question
        more.append(_REPLICAS)
    if plans:  # is judged as it is, under traffic of several sizes
        names = {word.lstrip("+").partition("=")[0] for word in typed}
        # what is typed goes over the plan
        typed = [*(word for word in words_of_plan(Path(plans[-1])) if word.partition("=")[0] not in names), *typed]
        more += [] if any(name.startswith("space") for name in names) else ["~space.parallel"]
    folder, code = run(plan(request(["study=serving", *more, *typed], own_folder(words))))
    return CommandAnswer(folder, code=code)


def _arrivals(typed: Sequence[str]) -> str:
    """Arrivals that are typed; those of a trace where one is named."""
    values = dict(word.split("=", 1) for word in typed if "=" in word)
    return values.get("traffic.arrivals", "trace" if "traffic.trace" in values else "closed")


def _value(text: str) -> float | str | None:
    """A number, none, or a text with its unit."""
    try:
        return None if text == "null" else float(text)
    except ValueError:
        return text
