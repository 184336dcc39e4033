"""The shapes of static draft trees: written as paths, or computed from measured acceptance.

A tree is its parents, as in `spec_jax.tree`: `parents[i]` is the node whose child node i is, -1 for a child of the last
committed token, and parents precede their children. Siblings stand in draw order; a node's rank is its place among its
siblings. This module needs NumPy alone.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from spec_jax.checks import check_counts, is_int, is_number
from spec_jax.tree_options import MAX_NODES

Path = tuple[int, ...]


def check_parents(parents: Sequence[int]) -> None:
    """Raises ValueError unless every parent precedes its child."""
    for node, parent in enumerate(parents):
        if not is_int(parent) or not -1 <= parent < node:
            raise ValueError(f"parents[{node}]={parent!r} must lie in -1..{node - 1}: parents precede their children")


def parse_tree(value: str | Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Parents of a tree that is given as paths.

    Args:
      value: one path per node, in any order: the ranks that lead to it from the last committed token. Lists or tuples,
        as Medusa writes its choices (https://arxiv.org/abs/2401.10774), `[[0], [0, 0], [1]]`, or the same as text, as
        vLLM's `speculative_token_tree`, `"[(0,), (0, 0), (1,)]"`.

    Returns:
      Parents of the nodes by depth and, within a depth, in the lexicographic order of their paths.

    Raises:
      ValueError: no paths, a path twice, a path whose parent or elder sibling is missing, or more than `MAX_NODES`.
    """
    paths = _read(value) if isinstance(value, str) else value
    if not isinstance(paths, (list, tuple)) or not paths:
        raise ValueError(f"tree={reprlib.repr(value)} must list one path of child ranks per node, one node at least, "
                         f"such as [[0], [0, 0], [1]]")  # fmt: skip
    if len(paths) > MAX_NODES:
        raise ValueError(f"a tree of {len(paths)} nodes is too large: at most {MAX_NODES}")
    for path in paths:
        if not isinstance(path, (list, tuple)) or not path or not all(is_int(rank) and rank >= 0 for rank in path):
            raise ValueError(f"tree path {reprlib.repr(path)} must be a list of child ranks, integers from 0 on, one "
                             f"at least: the last committed token is no node of the tree")  # fmt: skip
    ordered = sorted((tuple(int(rank) for rank in path) for path in paths), key=lambda path: (len(path), path))
    number: dict[Path, int] = {}
    for node, path in enumerate(ordered):
        *parent, rank = path
        for needed, why in ((tuple(parent), "its parent"), ((*parent, rank - 1), "the sibling before it")):
            if needed and needed[-1] >= 0 and needed not in number:
                path, needed = map(reprlib.repr, (path, needed))
                raise ValueError(f"tree path {path} needs {why}, {needed}: list that too, or leave {path} out")
        if path in number:
            raise ValueError(f"tree path {path} is listed twice: list every node once")
        number[path] = node
    return tuple(number.get(path[:-1], -1) for path in ordered)


def _read(text: str) -> Any:
    """The literal that a text holds, in Python's or in JSON's notation; lists of numbers look alike in both."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"tree={reprlib.repr(text)} is no list of paths such as '[(0,), (0, 0), (1,)]'") from error


def paths_of(parents: Sequence[int]) -> tuple[Path, ...]:
    """The path of every node, in the order of the nodes: what `parse_tree` reads.

    Raises:
      ValueError: a parent does not precede its child.
    """
    check_parents(parents)
    paths: list[Path] = []
    children = [0] * (len(parents) + 1)  # met so far, by parent; the last entry is the last committed token's
    for parent in parents:
        paths.append((paths[parent] if parent >= 0 else ()) + (children[parent],))
        children[parent] += 1
    return tuple(paths)


def expected_tokens(parents: Sequence[int], acceptances: Sequence[float]) -> float:
    """Tokens that a step with this tree emits on average, the target's own one included.

    Args:
      parents: of any static tree, the empty one included.
      acceptances: as in `sequoia_tree`.

    Raises:
      ValueError: parents that do not precede their children, acceptances that are none, or a child without one.
    """
    rates = _checked_rates(acceptances)
    total = 1.0
    reached: list[float] = []
    for node, (path, parent) in enumerate(zip(paths_of(parents), parents, strict=True)):
        if path[-1] >= len(rates):
            raise ValueError(f"node {node} is child {path[-1] + 1} of its parent, but acceptances has {len(rates)} "
                             f"entries: give one for every child")  # fmt: skip
        reached.append((reached[parent] if parent >= 0 else 1.0) * rates[path[-1]])
        total += reached[-1]
    return float(total)


@dataclasses.dataclass(frozen=True)
class SequoiaTree:
    """What `sequoia_tree` found.

    Attributes:
      parents: of the draft nodes, in the order of `parse_tree`; empty: plain decoding is best.
      expected_tokens: per step, the target's own one included.
      seconds_per_token: of such steps; None where no times were given.
    """

    parents: tuple[int, ...]
    expected_tokens: float
    seconds_per_token: float | None = None


def sequoia_tree(
    acceptances: Sequence[float],
    max_nodes: int,
    *,
    max_depth: int | None = None,
    target_seconds: Callable[[int], float] | Mapping[int, float] | None = None,
    draft_seconds: float | None = None,
) -> SequoiaTree:
    """The best static tree by Sequoia's dynamic programme (https://arxiv.org/abs/2402.12374).

    Without times it is the tree of at most `max_nodes` nodes with the most expected tokens, with times the one with the
    fewest seconds per token: `depth * draft_seconds + target_seconds(nodes + 1)` over its expected tokens, the empty
    tree (plain decoding) included. Nodes that would add nothing are left out. 128 nodes, 32 children and 16 levels take
    about 0.1 s on a CPU; time grows with children * levels * max_nodes ** 2.

    Args:
      acceptances: measured positional acceptance: the probability that the b-th child is the accepted one, given that
        its parent was accepted, b = 1, 2, ...; in any order. No node has more children than there are entries.
      max_nodes: draft nodes at most; the last committed token is none. Up to `MAX_NODES`.
      max_depth: levels of draft nodes at most; None: as many as there are nodes.
      target_seconds: seconds of a verification step by its rows, the last committed token's included. A mapping may
        leave row counts out: such steps are padded to the next one listed.
      draft_seconds: seconds of drafting one level; goes with `target_seconds`.

    Raises:
      ValueError: acceptances that are no probabilities or sum to more than 1; sizes or times that are none; a mapping
        that ends before `max_nodes + 1` rows.
    """
    rates = _checked_rates(acceptances)
    check_counts(max_nodes=max_nodes, max_depth=max_nodes if max_depth is None else max_depth)
    if max_nodes > MAX_NODES:
        raise ValueError(f"max_nodes={max_nodes} must be at most {MAX_NODES}")
    if (target_seconds is None) != (draft_seconds is None):
        raise ValueError(f"target_seconds={target_seconds!r} and draft_seconds={draft_seconds!r} go together: give "
                         f"both (draft_seconds=0 where drafting is free) or neither")  # fmt: skip
    levels = _gains(rates, max_nodes, min(max_depth or max_nodes, max_nodes))
    gains = np.stack([level[0] for level in levels])  # [depth + 1, nodes + 1]
    if target_seconds is None:
        depth, nodes, seconds = len(levels) - 1, max_nodes, None
    else:
        if not is_number(draft_seconds) or not 0 <= draft_seconds < math.inf:
            raise ValueError(f"draft_seconds={draft_seconds!r} must be a finite number of seconds, 0 or more")
        cost = draft_seconds * np.arange(len(levels))[:, None] + _seconds_by_nodes(target_seconds, max_nodes)
        # Only trees that have all of their nodes and levels cost what is said here: others gain nothing over smaller.
        full = (np.diff(gains, axis=0, prepend=-1.0) > 0) & (np.diff(gains, axis=1, prepend=-1.0) > 0)
        per_token = np.where(full, cost / (1 + gains), np.inf)
        depth, nodes = (int(i) for i in np.unravel_index(per_token.argmin(), per_token.shape))
        seconds = float(per_token[depth, nodes])
    paths = list(_paths(levels, rates, depth, nodes))
    return SequoiaTree(parse_tree(paths) if paths else (), 1 + float(gains[depth, nodes]), seconds)


def _checked_rates(acceptances: Sequence[float]) -> np.ndarray:
    """The acceptances as float64 [children]."""
    try:
        rates = list(acceptances)
    except TypeError:
        rates = []
    if not rates:
        raise ValueError(f"acceptances={acceptances!r} must list one probability per child, one at least")
    for child, rate in enumerate(rates):
        if not is_number(rate) or not 0 <= rate <= 1:
            raise ValueError(f"acceptances[{child}]={rate!r} must be a probability, from 0 to 1")
    if sum(rates) > 1 + 1e-6:
        raise ValueError(f"acceptances sum to {float(sum(rates))!r}, and at most one child is the accepted one: they "
                         f"must sum to at most 1")  # fmt: skip
    return np.array(rates, np.float64)


def _seconds_by_nodes(target_seconds: Callable[[int], float] | Mapping[int, float], max_nodes: int) -> np.ndarray:
    """Seconds of a verification step of 0..max_nodes draft nodes, float64 [max_nodes + 1]."""
    rows = range(1, max_nodes + 2)
    if isinstance(target_seconds, Mapping):
        if not all(is_int(count) and count >= 1 for count in target_seconds):
            raise ValueError(f"target_seconds has the keys {list(target_seconds)!r}: row counts must be positive "
                             f"integers")  # fmt: skip
        listed = np.array(sorted(target_seconds), np.int64)
        if not len(listed) or listed[-1] < rows[-1]:
            raise ValueError(f"target_seconds ends at {max(target_seconds, default=0)} rows, max_nodes={max_nodes} "
                             f"needs the time of {rows[-1]}: list that, or take fewer nodes")  # fmt: skip
        rows = listed[np.searchsorted(listed, rows)].tolist()
        times = {count: target_seconds[count] for count in rows}
    elif callable(target_seconds):
        times = {count: target_seconds(count) for count in rows}
    else:
        raise ValueError(f"target_seconds={target_seconds!r} must be a function or a mapping of rows to seconds")
    for count, seconds in times.items():
        if not is_number(seconds) or not 0 < seconds < math.inf:
            raise ValueError(f"target_seconds of {count} rows is {seconds!r}: it must be a positive number of seconds")
    return np.array([times[count] for count in rows], np.float64)


def _gains(rates: np.ndarray, nodes: int, depth: int) -> list[np.ndarray]:
    """The tables of the dynamic programme, one per depth: float64 [children + 1, nodes + 1].

    Entry [b, m] of table d: expected accepted tokens below an accepted node that spends up to m nodes on its children
    from rank b on, within d levels. Row 0 is the whole subtree's.
    """
    levels = [np.zeros((len(rates) + 1, nodes + 1))]
    for _ in range(depth):
        child = 1 + levels[-1][0, :-1]  # by the nodes spent on one child, itself included: 1..nodes
        level = np.zeros_like(levels[0])
        for rank in reversed(range(len(rates))):
            # Row m - 1 of `rest`: what the later siblings gain when nodes, ..., 1 of m nodes went to this child. More
            # than m cannot.
            rest = np.concatenate([np.full(nodes - 1, -np.inf), level[rank + 1, :-1]])
            rest = np.lib.stride_tricks.sliding_window_view(rest, nodes)
            level[rank, 1:] = np.maximum((rates[rank] * child[::-1] + rest).max(axis=1), 0.0)
        if np.array_equal(level[0], levels[-1][0]):
            break  # then no deeper table differs either
        levels.append(level)
    return levels


def _paths(levels: list[np.ndarray], rates: np.ndarray, depth: int, nodes: int) -> Iterable[Path]:
    """The tree behind entry [0, nodes] of the table of `depth`, every child with as few nodes as will do."""
    unspent: list[tuple[Path, int, int]] = [((), depth, nodes)]
    while unspent:
        path, depth, nodes = unspent.pop()
        for rank in range(len(rates) if depth else 0):
            gains = rates[rank] * (1 + levels[depth - 1][0, :nodes]) + levels[depth][rank + 1, :nodes][::-1]
            if not nodes or gains.max() <= 0:
                break
            spent = int(gains.argmax()) + 1
            yield (*path, rank)
            unspent.append(((*path, rank), depth - 1, spent - 1))
            nodes -= spent
