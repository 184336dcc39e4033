"""What this process runs on: versions, devices, cores. Reported by `bench` and `doctor`."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import spec_jax

PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python, this package and the packages that decide bits and speed."""
    found = {"python": platform.python_version(), "spec_jax": spec_jax.__version__}
    return found | {name: metadata.version(name) for name in PACKAGES}


def cpu_cores() -> int:
    """Cores this process may use, which in a container are fewer than the machine has."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not offered on macOS and Windows
        return os.cpu_count() or 1


def processor() -> str:
    """What tells one processor's instructions from another's; a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "|".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def devices() -> list[dict[str, Any]]:
    """One entry per JAX device."""
    import jax

    return [{"id": device.id, "platform": device.platform, "kind": device.device_kind} for device in jax.devices()]


def describe_device() -> str:
    """One line for tables and reports, such as `tpu: TPU v5 lite x 4`."""
    found = devices()
    first = found[0]
    if first["platform"] == "cpu":
        return f"cpu: {platform.machine()}, {cpu_cores()} cores"
    return f"{first['platform']}: {first['kind']} x {len(found)}"
