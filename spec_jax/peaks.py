"""What the machine at hand can do at most: bytes read from memory and operations of a large product, per second."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.kernels import cpu

REPEATS = 7
PROBE_READS = 4
LARGEST_PROBE = 1 << 30
"""Bytes; a larger array would tell nothing more about the memory's bandwidth."""
PROBE = 1 << 28
PRODUCT = (512, 4096, 4096)  # rows, inputs, outputs


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Medians over `REPEATS` measurements on one device; `memory` in bytes, None where the device does not tell."""

    bytes_per_second: float
    flops_per_second: float
    memory: int | None


def measure() -> Peaks:
    """Measures the default device: reading float32, and a product of bfloat16 on accelerators, of float32 on a CPU."""
    bandwidth = Bandwidth(PROBE)
    rows, inputs, outputs = PRODUCT
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    product, x, weight = jax.jit(jnp.matmul), jnp.ones((rows, inputs), dtype), jnp.ones((inputs, outputs), dtype)
    jax.block_until_ready(product(x, weight))
    seconds = []
    for _ in range(REPEATS):
        bandwidth.measure()
        start = time.perf_counter()
        jax.block_until_ready(product(x, weight))
        seconds.append(time.perf_counter() - start)
    flops = 2.0 * rows * inputs * outputs / statistics.median(seconds)
    return Peaks(statistics.median(bandwidth.speeds), flops, device_memory())


def device_memory() -> int | None:
    """Bytes of the default device's memory, of the host's where the device is the host; None where nobody tells."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def spread(values: Sequence[float], unit: float = 1) -> dict[str, float]:
    """Median, minimum and maximum, each times `unit`."""
    return {name: unit * f(values) for name, f in (("median", statistics.median), ("min", min), ("max", max))}


class Bandwidth:
    """How fast this device reads memory: bytes per second of an array of `size` bytes, at most `LARGEST_PROBE`."""

    def __init__(self, size: int):
        own = jax.default_backend() == "cpu" and cpu.unavailable() is None
        self._read_with, read = ("spec_jax.kernels.cpu.read", cpu.read) if own else ("jax.numpy.sum", jnp.sum)
        self._array = jnp.ones(max(min(size, LARGEST_PROBE) // 4, 1), jnp.float32)
        self.speeds: list[float] = []

        def again(_, carry):
            x, _ = lax.optimization_barrier(carry)  # every read waits for the one before
            return x, read(x).reshape(())

        def program(x):
            return lax.fori_loop(0, PROBE_READS, again, (x, jnp.float32(0)))

        self._program = jax.jit(program, donate_argnums=0)
        self._read()

    def _read(self) -> None:
        self._array, _ = jax.block_until_ready(self._program(self._array))

    def measure(self) -> None:
        start = time.perf_counter()
        self._read()
        self.speeds.append(PROBE_READS * self._array.nbytes / (time.perf_counter() - start))

    def report(self) -> dict[str, Any]:
        return {"bytes_per_second": spread(self.speeds), "bytes": self._array.nbytes, "read_with": self._read_with}
