"""Certainty of a deployment: its times and rivals with drawn errors of predictions, and under other traffic.

The parts of a step have the errors of their kinds (`simulators.hardware.residuals`), the same ones in every deployment,
so that what is off in all alike cancels; times of tokens have what measured deployments were off by beyond that, as one
factor for all (kinds `tpot` and `ttft`). Each draw serves the traffic anew, of a long trace its busiest part: times of
draws are scaled by those of the whole trace over those of this part, as predicted without errors. Other traffic has 1.5
times as much of one of its numbers, whole numbers rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dse.errors import ConfigError
from dse.results.decisions import ENDS, Decision, most_helpful
from dse_serving.deployment import Deployment
from dse_serving.design import Serving, deployment_of, formats, kernels, step_of, with_scheduler
from dse_serving.results import percentile
from dse_serving.steady import COARSE, FULL, Effort, serve_steadily
from dse_serving.step_times import EngineKernels, GemmTimeFactors
from dse_serving.traffic import TokenLengths
from simulators.hardware.residuals import (
    UNTOLD,
    Draws,
    JointDraws,
    ResidualGroup,
    name_in_tables,
    shipped_residuals,
    unmeasured_text,
)

Floats = NDArray[np.float64]
_FEW, _MANY = 64, 1024  # tokens of products whose errors are drawn
_MOST_DRAWN = 64  # each of which serves all requests
_SAMPLE = 1000  # requests whose outputs have the mean length of all
_NEVER = 1e30  # time of a token of a deployment beyond the limits [s]
MORE = 1.5
"""Times as much of a number of the traffic."""
NAMES = ("tokens_per_s_per_gpu", "ttft_s", "tpot_s")
"""What is drawn of a deployment."""


@dataclass(frozen=True)
class PartErrors:
    """Factors [S] on the times of the parts of a step of a design."""

    design: Serving
    draws: Draws

    @cached_property
    def by_kind(self) -> dict[str, Floats]:
        """Kind of error -> factors of its part that takes longest."""
        speeds = self.factors
        # steps that generate are most of a run, and their products have few tokens
        kinds = {"gemm": "weight_bound", "attention": "attention", "host": "host", "elementwise": "other"}
        if int(self.design.parallel.tp) > 1:
            kinds["collective"] = "sums"
        if int(step_of(self.design).parallel.ep) > 1:
            kinds["exchange"] = "exchanges"
        return {kind: speeds[part] for kind, part in kinds.items()}

    @cached_property
    def factors(self) -> dict[str, Floats]:
        """Part of a step -> factors."""
        design, (dense, experts) = self.design, formats(self.design)
        hidden = float(np.max(np.asarray(design.model.hidden)))
        # errors of products depend on their sizes: square ones of the model's width stand for all
        small, large = ({"m": float(tokens), "n": hidden, "k": hidden} for tokens in (_FEW, _MANY))
        factor = self.draws.factor
        drawn = {
            "weight_bound": factor("gemm", "dense", key=dense, sizes=small),
            "flop_bound": factor("gemm", "dense", key=dense, sizes=large),
            "attention": factor("attention", "attention", key=design.kernels.name),
            "other": factor("elementwise", "other"),
            "host": factor("host", "host", key="kernel"),
        }
        if int(design.parallel.tp) > 1:
            drawn["sums"] = factor("collective", "sums", key="inside")
        if getattr(design.model, "moe", None) is not None:
            drawn["experts"] = factor("gemm", "experts", key=experts, sizes=large)
        if int(step_of(design).parallel.ep) > 1:
            drawn["exchanges"] = factor("exchange", "dispatch", key="dispatch")
        return drawn

    def deployment(self, place: int) -> Deployment:
        """The deployment of the design with one of the draws."""
        base, drawn = kernels().of(self.design), {name: float(row[place]) for name, row in self.factors.items()}
        experts = drawn.get("experts", 1.0)
        speeds = EngineKernels(
            dense=_scaled(base.dense, drawn["weight_bound"], drawn["flop_bound"]),
            experts=_scaled(base.experts, experts, experts),
            **{name: getattr(base, name) for name in ("dispatch_s", "sum_s", "peer_s")},
            **{name: drawn.get(name, 1.0) for name in ("attention", "sums", "exchanges", "other")},
        )
        scheduler = self.design.server.scheduler
        # one error for all work of the host: it is off in all of it alike
        host = {name: getattr(scheduler, name) * drawn["host"] for name in ("host_s", "host_sequence_s", "launch_s")}
        return deployment_of(with_scheduler(self.design, host), speeds)


def _scaled(factors: GemmTimeFactors, weight_bound: float, flop_bound: float) -> GemmTimeFactors:
    """Factors on GEMM times with an error on each."""
    return GemmTimeFactors(weight_bound=factors.weight_bound * weight_bound, flop_bound=factors.flop_bound * flop_bound)


def residuals_of(design: Serving, kind: str, seconds: float) -> ResidualGroup:
    """Residuals of a time to the first token (`ttft`), or of each later one (`tpot`), predicted as `seconds`."""
    gpu, spec = name_in_tables(design.system.gpu), design.traffic
    sizes = {"seconds": seconds}
    if spec.arrivals == "closed":
        sizes |= {"requests": float(spec.concurrency), "tokens": float(spec.draw(_SAMPLE).inputs.mean())}
    # no design has a release
    traits = {"software": design.server.name, "model": str(design.model.name), "gpu": gpu, "release": UNTOLD}
    key = "apart" if design.engines.apart else "together"
    return shipped_residuals().of(kind, gpu, key, sizes, traits)


@dataclass(frozen=True)
class Served:
    """Deployments of one study, the best one first, by its limits."""

    designs: Sequence[Serving]
    limits: Mapping[str, float]

    def values(self, deployment: Deployment, design: Serving, effort: Effort = COARSE) -> list[float]:
        """Values of `NAMES` of a deployment; without any token where it cannot serve, or not keep up. The time of a
        later token is NaN where no answer has two.
        """
        share = float(design.slo.percentile)
        try:
            served = serve_steadily(deployment, design.traffic, percentile=share, effort=effort)
        except ConfigError:
            # never within a limit
            return [0.0, np.inf, np.inf]
        rate = served.rate(served.traffic.outputs) / deployment.gpus
        if served.offered_per_s:  # which brings as many to all, of however many requests they are served
            rate = served.offered_per_s * float(design.traffic.draw(_SAMPLE).outputs.mean()) / deployment.gpus
        return [rate, percentile(served.ttft_s, share), percentile(served.tpot_s, share)]

    def fits(self, values: Floats) -> NDArray[np.bool_]:
        """Tell where values [..., names] are within the limits."""
        fits = np.ones(values.shape[:-1], bool)
        for place, name in enumerate(NAMES):
            # a time of no tokens exceeds no limit
            fits &= ~(values[..., place] > self.limits.get(name, np.inf))
        return fits

    def costs(self, values: Floats) -> Floats:
        """GPU-seconds of a token [...]; `_NEVER` beyond the limits."""
        rates = values[..., 0]
        return np.asarray(np.where(self.fits(values) & (rates > 0), 1 / np.maximum(rates, 1e-30), _NEVER))

    def drawn(self, draws: JointDraws) -> tuple[Floats, dict[str, Floats]]:
        """Values [designs, draws, names] with drawn errors, and the factors of each kind of the best one."""
        errors, rows = [PartErrors(design, draws.of(design.system.gpu)) for design in self.designs], []
        for error in errors:
            # the same draw has the same errors in every deployment
            deployments = map(error.deployment, range(draws.size))
            rows.append([self.values(deployment, error.design) for deployment in deployments])
        values = np.array(rows) * self._levels[:, None]
        return values * self._wholes(values, draws.of(self.designs[0].system.gpu)), errors[0].by_kind

    def _wholes(self, values: Floats, draws: Draws) -> Floats:
        """Factors [draws, names] on all deployments: what times of whole deployments are off by beyond their parts."""
        design, factors = self.designs[0], np.ones(values.shape[1:])
        predicted = np.array(self.values(deployment_of(design), design)) * self._levels[0]
        for place, kind in ((1, "ttft"), (2, "tpot")):
            # the part of the error that drawn parts explain already
            ratios = values[0, :, place] / predicted[place]
            served = np.isfinite(ratios)
            if served.any():  # some draw keeps up with the traffic
                group = residuals_of(design, kind, float(predicted[place]))
                factors[:, place] = draws.remainder(group, kind, np.where(served, ratios, np.median(ratios[served])))
        if design.traffic.arrivals == "closed":  # others bring as many requests, however long each takes
            factors[:, 0] = 1 / factors[:, 1 if np.isnan(predicted[2]) else 2]
        return factors

    @cached_property
    def _levels(self) -> Floats:
        """Values [designs, names] of the whole traffic over those of the part that draws serve, as predicted."""
        return np.array([self._level(design) for design in self.designs])

    def _level(self, design: Serving) -> Floats:
        """The same of a design; 1 where the part is all."""
        if design.traffic.arrivals != "trace" or design.traffic.draw().size <= COARSE.most:
            return np.ones(len(NAMES))
        deployment = deployment_of(design)
        full, coarse = (np.array(self.values(deployment, design, effort)) for effort in (FULL, COARSE))
        # a part that cannot be served has no level to scale by
        is_ratio = np.isfinite(full) & np.isfinite(coarse) & (full > 0) & (coarse > 0)
        return np.where(is_ratio, full, 1.0) / np.where(is_ratio, coarse, 1.0)

    def under(self, change: Mapping[str, Any]) -> int:
        """Place of the best deployment under changed traffic; -1 where none is within the limits."""
        spec = self.designs[0].traffic.model_copy(update=dict(change))
        changed = [design.model_copy(update={"traffic": spec}) for design in self.designs]
        rows = [self.values(deployment_of(design), design) for design in changed]
        costs = self.costs(np.array(rows) * self._levels)
        return int(costs.argmin()) if costs.min() < _NEVER else -1


def other_traffic(design: Serving) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what traffic may be, in words, and the changes that make it so."""
    spec = design.traffic
    if spec.arrivals == "closed":
        yield "requests under way", {"concurrency": math.ceil(MORE * spec.concurrency)}
    elif spec.arrivals == "trace":
        yield "requests a second", {"speed": MORE * spec.speed}
    else:
        yield "requests a second", {"rate_per_s": MORE * spec.rate_per_s}
    if spec.arrivals != "trace" and not spec.mix:
        for name, words in (("input", "tokens of prompts"), ("output", "tokens of outputs")):
            lengths: TokenLengths = getattr(spec, name)
            longer = {"tokens": lengths.tokens, "most": lengths.most}  # what is cut at `most` would else stay as it is
            changes = {key: None if count is None else math.ceil(MORE * count) for key, count in longer.items()}
            yield words, {name: lengths.model_copy(update=changes)}


def decide(
    designs: Sequence[Serving], names: Sequence[str], limits: Mapping[str, float], *, settings: Any
) -> dict[str, Any]:
    """The entry of `summary.json` on the first of some deployments. names: of all, in words.

    settings: those of a study: `decide` and `seed`. ranges: 5 and 95 % of the draws that keep up with the traffic, by
    name, without those of no tokens, and of no draw; within, kept: share of the draws within the limits, and of those
    that keep up; deployments: what the intervals of times of tokens rest on, in words; changes: what traffic may have
    more of -> the best deployment then, "" for none.
    """
    served, size = Served(designs, limits), min(int(settings.decide.samples), _MOST_DRAWN)
    draws = JointDraws(size, int(settings.seed))
    values, factors = served.drawn(draws)
    times = served.costs(values)
    decision = Decision.of(times, None, least=settings.decide.least, rivals=names[1:], basis=draws.basis)
    within = served.fits(values[0])
    # fastest and within the limits: outside of them no draw counts as won
    decision = replace(decision, fastest=float(((times[0] <= times.min(axis=0)) & within).mean()))
    if not decision.is_decided:
        alone = {kind: np.stack([np.ones_like(row), row]) for kind, row in factors.items()}
        decision = replace(decision, measure=most_helpful(times, alone))
    # draws in which the best deployment keeps up
    served_draws = values[0][values[0][:, 0] > 0]
    ranges = ranges_of(served_draws)
    places = {words: served.under(change) for words, change in other_traffic(designs[0])}
    changes = {words: names[place] if place >= 0 else "" for words, place in places.items()}
    shares = {"within": float(within.mean()), "kept": len(served_draws) / size}
    rest_on = {}
    if len(served_draws):
        kind = "tpot" if "tpot_s" in ranges else "ttft"
        group = residuals_of(designs[0], kind, float(np.median(served_draws[:, NAMES.index(f"{kind}_s")])))
        rest_on = {"deployments": f"{group.rows} measured deployments{unmeasured_text(group)}"}
    return {**decision.json(), "ranges": ranges, **shares, **rest_on, "draws": size, "changes": changes}


def ranges_of(values: Floats) -> dict[str, list[float]]:
    """5 and 95 % of the draws that keep up, by name, of their values [draws, names]; none of no draws or no tokens."""
    drawn = {name: values[:, place] for place, name in enumerate(NAMES)}
    return {
        name: [float(end) for end in np.quantile(column, ENDS)]
        for name, column in drawn.items()
        if np.isfinite(column).any()
    }
