"""How sure a figure is, and whether two systems differ: for every metric, from its statistics of each example.

An interval is a bootstrap: examples drawn anew with replacement, and the middle 95% of the figures of 2,000 such samples. For
a difference both systems are given the same draws. The p-value is that of approximate randomisation (Noreen 1989): if the
systems were alike, it would not matter which of them wrote which of two outputs, so swap them at random and count how
often the difference is at least as large as the one measured. Everything is seeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from calibeam.paper.official import Figures

SAMPLES = 2000
LEVEL = 0.05
ROUNDING = 1e-9  # of a difference: swaps that change nothing must count as equal to it


class Interval(NamedTuple):
    value: float
    low: float
    high: float


class Difference(NamedTuple):
    before: float
    after: float
    difference: float
    low: float
    high: float
    p: float

    @property
    def verdict(self) -> str:
        """Both tests have to agree before anything is called a difference."""
        if self.p >= LEVEL or not (self.low > 0 or self.high < 0):
            return "no significant difference"
        return "significantly higher" if self.difference > 0 else "significantly lower"


def intervals(statistics: np.ndarray, figures: Figures, *, samples: int = SAMPLES, seed: int = 0) -> dict[str, Interval]:
    """Every figure of statistics [examples, k] with its 95% interval."""
    examples = len(statistics)
    (sums,) = _resampled([statistics], samples, seed)
    drawn = figures(sums, examples)
    values = figures(statistics.sum(0), examples)
    return {name: Interval(float(value), *_middle(drawn[name])) for name, value in values.items()}


def paired(
    before: np.ndarray, after: np.ndarray, figures: Figures, *, samples: int = SAMPLES, seed: int = 0
) -> dict[str, Difference]:
    """Every figure of two systems on the same examples, with the interval and the p-value of their difference."""
    import numpy as np

    if before.shape != after.shape:
        raise ValueError(f"statistics of shape {before.shape} and {after.shape} are not of the same examples")
    examples, sums = len(before), (before.sum(0), after.sum(0))
    moved = _swapped(after - before, samples, seed)
    left, right = (figures(total, examples) for total in sums)
    left_drawn, right_drawn = (figures(drawn, examples) for drawn in _resampled([before, after], samples, seed))
    left_swapped, right_swapped = figures(sums[0] + moved, examples), figures(sums[1] - moved, examples)
    found = {}
    for name in left:
        difference = float(right[name] - left[name])
        by_chance = np.abs(right_swapped[name] - left_swapped[name])
        as_large = int((by_chance >= abs(difference) * (1 - ROUNDING)).sum())
        low, high = _middle(right_drawn[name] - left_drawn[name])
        p = (as_large + 1) / (samples + 1)
        found[name] = Difference(float(left[name]), float(right[name]), difference, low, high, p)
    return found


def relative(
    before: Sequence[np.ndarray],
    after: Sequence[np.ndarray],
    figures: Figures,
    name: str,
    *,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Difference:
    """The mean over datasets of one figure, of two systems, and by which share of the first the second is higher.

    As the paper's Delta of R_m. Examples are drawn, and swapped, within each dataset.
    """
    import numpy as np

    numbers = range(len(before))

    def mean(sums: Sequence[np.ndarray]) -> np.ndarray:
        return np.mean([figures(each, len(before[number]))[name] for number, each in enumerate(sums)], axis=0)

    left, right = (float(mean([each.sum(0) for each in some])) for some in (before, after))
    moved = [_swapped(after[number] - before[number], samples, seed + number) for number in numbers]
    swapped = mean([after[number].sum(0) - moved[number] for number in numbers])
    by_chance = np.abs(swapped - mean([before[number].sum(0) + moved[number] for number in numbers]))
    p = (int((by_chance >= abs(right - left) * (1 - ROUNDING)).sum()) + 1) / (samples + 1)
    drawn = [_resampled([before[number], after[number]], samples, seed + number) for number in numbers]
    left_drawn, right_drawn = (mean(some) for some in zip(*drawn, strict=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = _middle(right_drawn / left_drawn - 1)
        return Difference(left, right, float(np.float64(right) / left - 1), low, high, p)


def _resampled(systems: Sequence[np.ndarray], samples: int, seed: int) -> list[np.ndarray]:
    """Sums over as many examples, drawn with replacement, the same from every system. [samples, k] of each"""
    import numpy as np

    generator, examples = np.random.default_rng(seed), len(systems[0])
    times_drawn = (np.bincount(generator.integers(examples, size=examples), minlength=examples) for _ in range(samples))
    sums = zip(*([times @ statistics for statistics in systems] for times in times_drawn), strict=True)
    return [np.stack(some) for some in sums]


def _swapped(change: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """The sums of a change [examples, k] over examples chosen by the toss of a coin. [samples, k]"""
    import numpy as np

    generator = np.random.default_rng(seed)
    return np.stack([generator.integers(2, size=len(change)) @ change for _ in range(samples)])


def _middle(values: np.ndarray) -> tuple[float, float]:
    import numpy as np

    low, high = np.quantile(values, (LEVEL / 2, 1 - LEVEL / 2))
    return float(low), float(high)
