"""Automata over bytes: from a regular expression, by the optional package `outlines-core`, and where words lead in one.

An automaton is a table of next states, int32 [states, 256] with -1 for none; state 0 is the initial one.
"""

from __future__ import annotations

import re
import warnings

import numpy as np

_END = 256  # what outlines-core is given as the id of the end of the text, behind those of the 256 bytes


def import_outlines():
    """The package `outlines_core`; ImportError, with what to install, where it is missing."""
    try:
        import outlines_core
    except ImportError:
        raise ImportError("grammars need outlines-core: pip install 'spec_jax[grammar]'") from None
    return outlines_core


def unanchored(pattern: str) -> str:
    """`pattern` without the anchors at its ends, which mean nothing where the whole text has to match."""
    pattern = pattern.removeprefix("^")
    return pattern[:-1] if re.search(r"(?<!\\)(\\\\)*\$\Z", pattern) else pattern


def byte_automaton(pattern: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The automaton of all texts that match `pattern` from end to end, and which states are final, bool [states].

    outlines-core could index the tokens itself, but with one dict entry per state and allowed token: a few free strings
    are millions. So its vocabulary is the 256 bytes here. Three of its traits (0.2.14) need a way around:
      - It keeps only the leftmost branch that matches: of `a|ab` it never allows "ab". With the end of the text in the
        expression, no branch matches too early.
      - It rejects expressions with an anchor, such as that end, in front of the first byte. So a byte 0 leads.
      - It also compiles the search that may start anywhere, which takes time exponential in a repetition's count. The
        empty branch, which matches at once, cuts that search off. It also hides the step behind byte 0, but the state
        there is known by this: no other step leads to it.

    Raises ValueError, naming `name`, for a pattern that is malformed or that no automaton can follow.
    """
    pattern = unanchored(pattern)
    # Alone first: it must not close the group below, nor have an anchor that would never match behind the byte 0.
    _index(f"{pattern}|", pattern, name)
    index = _index(rf"\x00(?:{pattern})\z|", pattern, name)
    transitions, final = index.get_transitions(), index.get_final_states()
    entry = transitions.pop(index.get_initial_state())
    if 0 in entry:
        initial = entry[0]
    else:
        led_to = {to for row in transitions.values() for byte, to in row.items() if byte != _END}
        initial = next(iter(transitions.keys() - led_to), None)
        if initial is None:
            raise ValueError(f"{name} cannot be compiled: nothing matches it")
    number = {state: i for i, state in enumerate(sorted(transitions, key=lambda state: state != initial))}
    table = np.full((len(number), _END + 1), -1, np.int32)
    for state, row in transitions.items():
        table[number[state], list(row)] = [number[to] for to in row.values()]
    return table[:, :_END], np.array([state in final for state in number])


def follow_words(table: np.ndarray, *groups: list[bytes]) -> tuple[np.ndarray, ...]:
    """Where words lead from every state of `table`.

    Returns int32 [columns, states] with -1 for nowhere, and for every group of words int64 [words]: their columns.
    Words share prefixes and most prefixes lead the same way from all states, so few columns are computed.
    """
    nowhere = len(table)  # a state of its own, so that columns can be indexed by columns
    steps = np.vstack([np.where(table < 0, nowhere, table), np.full(256, nowhere)]).astype(np.int32)
    letters, letter_of = np.unique(steps, axis=1, return_inverse=True)
    letters, letter_of = np.ascontiguousarray(letters.T), letter_of.ravel().tolist()
    columns = [np.arange(nowhere + 1, dtype=np.int32)]
    known, follow = {columns[0].tobytes(): 0}, {}

    def column_of(word: bytes) -> int:
        at = 0
        for byte in word:
            key = (at, letter_of[byte])
            if key not in follow:
                column = letters[key[1]][columns[at]]
                follow[key] = known.setdefault(column.tobytes(), len(columns))
                if follow[key] == len(columns):
                    columns.append(column)
            at = follow[key]
        return at

    found = [np.array([column_of(word) for word in words], np.int64) for words in groups]
    stacked = np.stack(columns)[:, :nowhere]
    return np.where(stacked == nowhere, -1, stacked), *found


def _index(expression: str, pattern: str, name: str):
    core = import_outlines()
    try:
        return core.Index(expression, core.Vocabulary(_END, {bytes([byte]): [byte] for byte in range(_END)}))
    except ValueError as error:
        reason = "a branch matches nothing" if "vocabulary" in str(error) else str(error)
    with warnings.catch_warnings(action="ignore"):
        try:
            re.compile(pattern)
        except re.error as error:  # it says what and where, which outlines-core does not
            reason += f"; Python's re says: {error}"
    raise ValueError(
        f"{name} cannot be compiled: {reason} (not supported: look-around, back-references, Unicode word boundaries,"
        " anchors inside)"
    )
