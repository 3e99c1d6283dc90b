"""When a run stops by itself: a gradient that is not finite, or a loss that jumps."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterable, Sequence

from qwen35_jax.errors import Qwen35Error

WINDOW = 20
"""Steps that a loss is compared with."""
MOST_NAMES = 4


class TrainingError(Qwen35Error):
    """A run that cannot go on: tells the step, and what was found there."""


class Guard:
    """Looks at every step.

    A spike is a loss that lies more than so many nats above the median of the `WINDOW` steps before it. The
    median follows a run whose loss falls, and one hard batch does not move it. Until there are so many steps, nothing
    is a spike.

    Args:
        names: of the parameters that are trained, in the order of `jax.tree.leaves`.
        spike: in nats; infinity for no limit.
        measure: what the loss is called.
        before: losses of the steps done so far, in order, where a run goes on.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        spike: float,
        measure: str = "cross-entropy",
        before: Iterable[float] = (),
    ):
        self._names = names
        self._measure = measure
        self._spike = spike
        self._before = collections.deque(before, maxlen=WINDOW)

    def check(self, step: int, loss: float, finite: Sequence[bool]) -> None:
        """Takes a step in.

        Args:
            step: its number, from 1.
            loss: of its batch, before the update, in nats.
            finite: for each parameter, whether its gradient held neither NaN nor infinity.

        Raises:
            TrainingError: a gradient is not finite, and the names of the parameters tell where; or the loss is not, or
                is a spike.
        """
        broken = [name for name, fine in zip(self._names, finite, strict=True) if not fine]
        if broken:
            more = f" and {len(broken) - MOST_NAMES} more" if len(broken) > MOST_NAMES else ""
            raise TrainingError(
                f"step {step}: the gradient of {', '.join(broken[:MOST_NAMES])}{more} is not finite (of "
                f"{len(broken)} of {len(self._names)} parameters; {self._measure} {loss:.4g}); the parameters "
                "were left as they are: lower optimizer.learning_rate, or look at the data of that step"
            )
        if not math.isfinite(loss):
            raise TrainingError(f"step {step}: the {self._measure} is {loss}, expected a finite number")
        if len(self._before) == WINDOW:
            middle = statistics.median(self._before)
            if loss > middle + self._spike:
                raise TrainingError(
                    f"step {step}: the {self._measure} is {loss:.4g}, more than run.spike = {self._spike:g} "
                    f"nats above {middle:.4g}, the median of the {WINDOW} steps before: go on from the last "
                    "checkpoint with another learning rate, or raise run.spike"
                )
        self._before.append(loss)
