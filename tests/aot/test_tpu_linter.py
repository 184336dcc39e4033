"""The TPU compiler's linter on the kernel, and that it finds a planted error. Needs the extra `aot`."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

FLAGS = (
    "--xla_tpu_enable_llo_linter=true",
    "--xla_tpu_llo_linter_analyze_tpu_custom_calls=true",
    "--xla_tpu_llo_linter_crash_on_error=true",
    "--xla_tpu_llo_linter_targets=.*",
    "--xla_tpu_llo_race_analysis_check_vld_vst=true",
    "--xla_tpu_llo_linter_hlo_filter=verification_attention.*",  # else it looks at XLA's own fusions too
)


def is_too_old():
    """Whether the installed libtpu has no linter yet; none at all is no reason to skip."""
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:3])) < (0, 0, 52)


pytestmark = [pytest.mark.aot, pytest.mark.skipif(is_too_old(), reason="the linter came with libtpu 0.0.52")]


def lint(name):
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": " ".join(FLAGS), "PYTHONPATH": path}
    return subprocess.run([sys.executable, here / "linted.py", name], env=environment, capture_output=True, text=True)


def test_the_kernel_reads_nothing_uninitialised_and_waits_for_every_copy():
    done = lint("kernel")
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_planted_read_before_its_wait_is_found():
    assert lint("waits").returncode == 0
    done = lint("forgets_to_wait")
    assert done.returncode != 0
    assert "dma_race" in done.stderr, done.stderr[-2000:]
