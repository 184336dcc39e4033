"""A progress bar on stderr for calls in which prompts wait for slots."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class _Bar:
    def __init__(self, progress: Any, task: Any):
        self._progress, self._task, self._tokens = progress, task, 0

    def advance(self, tokens: int, sequences: int = 1) -> None:
        """So many sequences more have ended, with this many tokens."""
        self._tokens += tokens
        self._progress.update(self._task, advance=sequences, tokens=self._tokens)


@contextlib.contextmanager
def progress_bar(asked: bool | None, total: int, slots: int) -> Iterator[_Bar | None]:
    """A bar over `total` sequences, or None.

    Args:
      asked: True or False; None shows one where stderr is a terminal and there are more sequences than slots.
    """
    shown = asked if asked is not None else total > slots and sys.stderr is not None and sys.stderr.isatty()
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _Bar(progress, progress.add_task("", total=total, tokens=0))
