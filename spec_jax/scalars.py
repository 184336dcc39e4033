"""TensorBoard scalars, written without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class ScalarWriter:
    """Writes named numbers into an event file that `tensorboard --logdir` shows; use it as a context manager.

    With `logdir=None` nothing is written, so callers need no second path.
    """

    def __init__(self, logdir: str | Path | None):
        self._writer = None
        if logdir is not None:
            from tensorboard.summary import Writer  # takes most of a second to import

            self._writer = Writer(str(logdir))

    def write(self, step: int, scalars: Mapping[str, float | int | None]) -> None:
        """Adds one value per tag at `step`. None means "not defined", and leaves a gap rather than a zero."""
        if self._writer is None:
            return
        for tag, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(tag, float(value), step)

    def __enter__(self) -> ScalarWriter:
        return self

    def __exit__(self, *exc_info) -> None:
        if self._writer is not None:
            self._writer.close()
