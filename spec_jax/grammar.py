"""Grammars for constrained decoding: the output matches a regular expression, or is JSON that fits a schema.

    import spec_jax.grammar

    grammar = spec_jax.grammar.regex_grammar(r"(yes|no), because [a-z ]+\\.", target)
    result = spec_jax.generate(target, prompts, None, spec_jax.SamplingParams(mask_fn=grammar))

Needs the extra `grammar`: pip install 'spec_jax[grammar]'. There, `outlines-core` compiles the expression to an
automaton over bytes; this module carries it over to the tokens of a vocabulary. What is constrained is the text of the
output's tokens without the end-of-text token, as `Tokenizer.decode` gives it. A grammar costs a fraction of a second to
build and belongs to the one model it was built for; it can be used for any number of rows and calls.

Expressions are those of Rust's `regex` crate: no look-around, no back-references, no Unicode word boundaries. `^` in
front and `$` at the end are allowed and change nothing, because the whole text has to match. Time and memory grow with
the number of states: ambiguous counted repetitions such as `(a{1,200}){1,200}` can take minutes and gigabytes.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.byte_automaton import byte_automaton, follow_words
from spec_jax.cache import power_of_two
from spec_jax.json_schema import schema_pattern
from spec_jax.token_bytes import token_bytes

if TYPE_CHECKING:
    from spec_jax.models.model import Model

_MIN_SIDE = 64  # smallest side of a table, so that most small grammars share one shape


@flax.struct.dataclass(eq=False)  # compared by identity: arrays that are equal have no single truth value
class TokenAutomaton:
    """A deterministic automaton over token ids, to be used as `SamplingParams.mask_fn`.

    Both arrays are leaves, so a program compiled for one grammar serves every grammar of the same shapes; states and
    classes are padded to powers of two for that. The initial state is 0. The last state is dead: it allows nothing, and
    illegal tokens and end-of-text tokens lead there.

    Attributes:
      next_state: int32 [states, classes], -1 where a class is not allowed.
      class_of: int32 [vocab_size]; tokens of one class have the same transitions in all states.
    """

    next_state: jax.Array
    class_of: jax.Array

    def __call__(self, state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Takes one token of one row.

        Args:
          state: int32 scalar, 0 in front of the first token.
          token: int32 scalar, any value; a negative one leaves the state as it is.

        Returns:
          The next state, int32 scalar, and the tokens that it allows, bool [vocab_size].
        """
        vocab_size, dead = self.class_of.shape[0], self.next_state.shape[0] - 1
        after = self.next_state[state, self.class_of[jnp.clip(token, 0, vocab_size - 1)]]
        after = jnp.where((after < 0) | (token >= vocab_size), dead, after)
        state = jnp.where(token < 0, state, after).astype(jnp.int32)
        return state, (self.next_state[state] >= 0)[self.class_of]


def regex_grammar(pattern: str, target: Model) -> TokenAutomaton:
    """The grammar of all texts that match `pattern` from end to end.

    Raises:
      ValueError: a pattern that is malformed or that no automaton can follow; one that no sequence of the model's
        tokens matches; a model without tokenizer or end-of-text ids, or whose tokens' bytes cannot be told.
      ImportError: `outlines-core` is not installed.
    """
    if not isinstance(pattern, str):
        raise ValueError(f"pattern={pattern!r:.80} must be a str")
    name = f"the pattern {pattern!r:.200}"
    _check_target(target)
    return _token_automaton(*byte_automaton(pattern, name), target, name)


def json_schema_grammar(schema: str | dict[str, Any], target: Model) -> TokenAutomaton:
    """The grammar of JSON texts that are valid for `schema`, written with at most one space between JSON's tokens.

    Supported: `type` (one or several), `properties`, `required`, `additionalProperties`, `items`, `prefixItems`,
    `minItems`, `maxItems`, `minLength`, `maxLength`, `pattern`, `format` (date, time, date-time, uuid, ipv4), `enum`
    and `const` of scalars, `anyOf`, `allOf` of one schema, and `$ref` inside the document if it is not recursive. The
    grammar is narrower than the schema in places: properties come in the schema's order, others only where it names
    none; objects and arrays of unspecified content nest two levels; a `pattern` is for the whole string, which then has
    no escapes; an array with `prefixItems` has exactly those.

    Args:
      schema: JSON text, or what `json.loads` makes of it.

    Raises:
      ValueError: text that is not JSON; a keyword that cannot be honoured, with its place in the schema (only
        descriptions are ignored); and as in `regex_grammar`.
      ImportError: `outlines-core` is not installed.
    """
    name = f"the JSON schema {repr(schema) if isinstance(schema, str) else reprlib.repr(schema):.200}"
    _check_target(target)
    return _token_automaton(*byte_automaton(schema_pattern(schema, name), name), target, name)


def _check_target(target: Model):
    if target.tokenizer is None:
        raise ValueError(f"the model {target.name!r} has no tokenizer, so a grammar cannot tell its tokens' text")
    if not any(i < target.vocab_size for i in target.eos_token_ids):
        raise ValueError(f"the model {target.name!r} has no end-of-text ids, so a grammar could not end its output")


# --- From bytes to tokens ---------------------------------------------------------------------------------------------


def _token_automaton(table: np.ndarray, final: np.ndarray, target: Model, name: str) -> TokenAutomaton:
    """Carries a byte automaton (see `byte_automaton`) over to the model's tokens.

    Raises ValueError, naming `name`, if no sequence of tokens matches.
    """
    words, heads = token_bytes(target.tokenizer)
    eos = [i for i in target.eos_token_ids if i < target.vocab_size]
    hidden = {*target.tokenizer.special_ids, *eos, target.tokenizer.bos_token_id}
    ids = [i for i in range(min(target.vocab_size, len(words))) if words[i] and i not in hidden]
    columns, of_word, of_head = follow_words(table, [words[i] for i in ids], [heads[i] for i in ids])
    # Rows: 0 in front of the first token, where the decoder may drop a space, so nothing leads back to it; then the
    # states of `table`; then the dead state. Columns: the kinds of tokens; end of text; what is never allowed.
    kinds, kind = np.unique(np.stack([of_word, columns[of_head, 0]]), axis=1, return_inverse=True)
    count, dead, end = len(table) + 2, len(table) + 1, kinds.shape[1]
    rows = np.full((count, end + 2), -1)
    rows[0, :end] = kinds[1]
    rows[1:dead, :end] = columns[kinds[0]].T
    rows[rows >= 0] += 1
    rows[1:dead, end] = np.where(final, dead, -1)
    rows[0, end] = rows[1, end]
    column_of = np.full(target.vocab_size, end + 1)
    column_of[ids] = kind.ravel()
    column_of[eos] = end
    # Only what lies between the start and an end is kept: a text must never come to where no token continues it.
    source, at = np.nonzero(rows >= 0)
    to = rows[source, at]
    kept = _reached(source, to, 0, count) & _reached(to, source, dead, count)
    if not kept[0]:
        raise ValueError(f"{name}: no sequence of tokens of the model {target.name!r} matches it")
    number = np.full(count + 1, -1)  # the last entry is for "not allowed", -1
    number[:-1][kept] = np.arange(kept.sum())
    states = _side(kept.sum())
    number[dead] = states - 1
    classes, class_of = np.unique(number[rows[:dead][kept[:dead]]], axis=1, return_inverse=True)
    next_state = np.full((states, _side(classes.shape[1])), -1, np.int32)
    next_state[: classes.shape[0], : classes.shape[1]] = classes
    return TokenAutomaton(jnp.asarray(next_state), jnp.asarray(class_of.ravel()[column_of].astype(np.int32)))


def _side(count: int) -> int:
    return max(_MIN_SIDE, power_of_two(int(count)))


def _reached(source: np.ndarray, to: np.ndarray, start: int, count: int) -> np.ndarray:
    """Which of `count` states a path along the edges `source[i]` -> `to[i]` from `start` comes to; bool [count]."""
    order = np.argsort(source, kind="stable")
    to, begin = to[order], np.searchsorted(source[order], np.arange(count + 1))
    reached, waiting = np.zeros(count, bool), [start]
    reached[start] = True
    while waiting:
        state = waiting.pop()
        new = np.unique(to[begin[state] : begin[state + 1]])
        new = new[~reached[new]]
        reached[new] = True
        waiting.extend(new.tolist())
    return reached
