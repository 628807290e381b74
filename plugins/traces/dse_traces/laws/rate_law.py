"""The time of a collective over its payload and the SMs that run it, as a law fitted to a table or a profile.

    T(b, s) = a + d s + (x^p + y^p)^(1/p),    x = b / (r s),    y = b (1 + k s) / R

b: payload [bytes]; s: SMs (CTAs, channels); a: latency; d: start of a further SM; r: rate of an SM; R: rate of the
links; k: by which each SM crowds the links; p: how sharp the bend between both is. With d = k = 0 and p = infinity it
is T = a + b / min(R, r s), the alpha-beta model with a rate that saturates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# bounds of the fit: latency, start of an SM, rate of an SM, rate of the links, crowding, bend
_LOWEST = (1e-7, 1e-10, 1e6, 1e8, 1e-6, 1.0)
_HIGHEST = (1e-2, 1e-4, 1e12, 1e14, 1e-1, 12.0)
_BENDS = (1.5, 4.0)  # from which the fit begins
_SPREAD = (0.1, 0.9)  # quantiles of the residuals: 80 % of the observations


@dataclass(frozen=True)
class RateLaw:
    """Constants of the law. spread: measured over predicted time of the rows, quantiles 0.1 and 0.9."""

    latency_s: float
    start_s_per_sm: float
    bytes_per_s_per_sm: float
    bytes_per_s: float
    crowding: float
    bend: float
    spread: tuple[float, float] = (1.0, 1.0)

    def seconds(self, payload_bytes: ArrayLike, sms: ArrayLike) -> Floats:
        """Time of payloads on numbers of SMs, which broadcast."""
        num = np.asarray(sms, float)
        moved = np.asarray(payload_bytes, float) * self.seconds_per_byte(num)
        return np.asarray(self.latency_s + self.start_s_per_sm * num + moved)

    def seconds_per_byte(self, sms: ArrayLike) -> Floats:
        """Time of a byte of a long message on numbers of SMs."""
        num = np.asarray(sms, float)
        by_sms, by_links = 1 / (self.bytes_per_s_per_sm * num), (1 + self.crowding * num) / self.bytes_per_s
        # the larger one is factored out of the p-norm, so that no power of a tiny time is formed
        most, least = np.maximum(by_sms, by_links), np.minimum(by_sms, by_links)
        return np.asarray(most * (1 + (least / most) ** self.bend) ** (1 / self.bend))


def fit_rate_law(payload_bytes: ArrayLike, sms: ArrayLike, seconds: ArrayLike) -> RateLaw:
    """Fit the law to measured times [N], robustly on their logarithms.

    Raises ValueError for fewer than 6 rows, as many as it has constants, and for a time that is not positive.
    """
    from scipy.optimize import least_squares

    payload, num, times = (np.asarray(values, float) for values in (payload_bytes, sms, seconds))
    if times.size < len(_LOWEST) or not (times > 0).all():
        raise ValueError(f"{times.size} rows: the law has {len(_LOWEST)} constants, and times are positive")

    def residuals(logs: Floats) -> Floats:
        # relative errors: short and long messages count alike
        return np.asarray(np.log(_law(logs).seconds(payload, num) / times))

    # all constants are positive, so the fit is of their logarithms, without constraints between them
    bounds = np.log(_LOWEST), np.log(_HIGHEST)
    starts = [np.clip(_first_guess(payload, num, times, bend=bend), *bounds) for bend in _BENDS]
    # soft_l1 with 5 %: single slow runs must not pull the law; two starts, as a fit may stop at a local minimum
    fits = [least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=0.05) for start in starts]
    best = min(fits, key=lambda fit: float(fit.cost)).x
    # residuals are predicted over measured, the spread is measured over predicted
    low, high = np.quantile(np.exp(-residuals(best)), _SPREAD)
    return _law(best, (float(low), float(high)))


def _law(logs: Floats, spread: tuple[float, float] = (1.0, 1.0)) -> RateLaw:
    latency, start, of_sm, of_links, crowding, bend = np.exp(logs).tolist()
    return RateLaw(latency, start, of_sm, of_links, crowding, bend, spread)


def _first_guess(payload: Floats, sms: Floats, times: Floats, *, bend: float) -> Floats:
    """Logarithms of constants from which a fit begins, inside the bounds."""
    # the largest payload shows rates, the shortest time the latency
    longest = payload == payload.max()
    rates = payload[longest] / times[longest]
    # even the best run is below the rate of the links: 1.2 times as much is where the search begins
    guess = [times.min() / 2, 1e-8, (rates / sms[longest]).max(), 1.2 * rates.max(), 1e-4, bend]
    # strictly inside, as the solver needs a feasible start
    return np.asarray(np.log(np.clip(guess, 1.001 * np.array(_LOWEST), 0.999 * np.array(_HIGHEST))))
