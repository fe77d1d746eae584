"""Time several things side by side, so that a busy machine slows all of them."""

import gc
import time
from collections.abc import Callable
from typing import NamedTuple


class Time(NamedTuple):
    """The best of several runs, in seconds: on the clock, and of all the cores together."""

    wall: float
    cpu: float

    def over(self, base: "Time") -> dict[str, float]:
        """Return the ratios to another time."""
        return {"wall": self.wall / base.wall, "cpu": self.cpu / base.cpu}


def interleave(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, Time]:
    """Run every function in turn, several times, and keep the best of each."""
    best = {name: Time(float("inf"), float("inf")) for name in functions}
    for function in functions.values():
        function()
    gc.collect()
    for _ in range(rounds):
        for name, function in functions.items():
            wall, cpu = time.perf_counter(), time.process_time()
            function()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            best[name] = Time(min(best[name].wall, wall), min(best[name].cpu, cpu))
    return best
