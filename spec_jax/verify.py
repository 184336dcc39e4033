"""Verification rules: which draft tokens are kept, and which token follows them. Pure functions of logits and keys.

`greedy` and `coupled` (Gumbel-max with noise keyed by position) let the target choose a token at every row in flight
and keep the drafts that equal its choice: every emitted token is the target's own, so the text cannot depend on the
drafter. The others (`spec_jax.rules`) keep more of sampled drafts, and their law is the target's: `standard` tests
token by token and `block` the draft as a whole; `recursive`, `kseq` and `traversal` do so for trees. Rules whose name
begins with `lossy_` change the law.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax import sampling as sampling_lib
from spec_jax.drafting.base import Draft
from spec_jax.laws import Laws
from spec_jax.processors import History
from spec_jax.rules import lossy
from spec_jax.rules.base import Tree, Verification
from spec_jax.rules.block import block_rule
from spec_jax.rules.kseq import kseq_rule
from spec_jax.rules.recursive import recursive_rule
from spec_jax.rules.token import token_rule
from spec_jax.rules.traversal import traversal_rule
from spec_jax.sampling import SamplingState


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is known of a rule that judges drafts by laws.

    Attributes:
      function: (Laws, Tree, *options) -> Verification.
      trees: whether it verifies trees; every rule verifies chains.
      of_round: whether its noise belongs to a round and not to a position, see `sampling.of_round`.
      independent: whether siblings must have been drawn independently from one law.
    """

    function: Callable[..., Verification]
    trees: bool = True
    of_round: bool = True
    independent: bool = False


RULES = {
    "standard": Rule(token_rule, trees=False, of_round=False),
    "block": Rule(block_rule, trees=False),
    "recursive": Rule(recursive_rule),
    "kseq": Rule(kseq_rule, independent=True),
    "traversal": Rule(traversal_rule),
    "lossy_typical": Rule(lossy.typical_rule),
    "lossy_relaxed": Rule(lossy.relaxed_rule),
    "lossy_lenience": Rule(lossy.lenience_rule, trees=False, of_round=False),
}
"""All rules but `coupled`, which compares tokens."""
CHAIN_RULES = tuple(name for name, rule in RULES.items() if not rule.trees)
TREE_RULES = ("coupled", *(name for name, rule in RULES.items() if rule.trees))
ROUND_RULES = tuple(name for name, rule in RULES.items() if rule.of_round)

NEAR_TIE = {"float32": 2e-4, "bfloat16": 1.5}
"""Lead of the chosen token under which a choice counts as a near-tie: twice the largest difference measured between
the logits of one token at different row counts (SmolLM2-135M, CPU: 8e-5 in float32, 0.75 in bfloat16). A sampled
choice is judged by its lead in logits, that is times the temperature; tokens at the edge of a filter, and sampled rows
under `standard`, are not judged."""


def verify(
    rule: str,
    logits: jax.Array,
    draft: Draft,
    row_parents: jax.Array,
    depth: jax.Array,
    chain: bool,
    length: jax.Array,
    sampling: SamplingState,
    vocab_size: int,
    history: History | None = None,
    wanted: jax.Array | None = None,
    options: tuple[float, ...] = (),
) -> Verification:
    """Applies `rule` to one step.

    Args:
      rule: "coupled" (greedy where the temperature is 0) or one of `RULES`.
      logits: float32 [batch, width, vocab] of the rows in flight; row 0 follows the last committed token.
      draft: the proposals; node i is row i + 1. Ids outside the vocabulary are refused.
      row_parents: int32 [batch, nodes], the row that each node is a child of.
      depth: int32 [batch, width] depth of every row.
      chain: whether the nodes that can be accepted form a chain in rows 1, 2, ...
      length: int32 [batch], committed tokens: the position of the first token to emit.
      vocab_size: ids at and beyond it are padding.
      history: what precedes the token that follows each row, where `sampling.processors` asks for it.
      wanted: bool [batch, width], rows that can be on an accepted path; None: all. The others are not looked at.
      options: what the rule's function wants beside, of lossy rules.

    Raises:
      ValueError: for an unknown rule, or a rule that cannot verify a tree, or not such siblings.
    """
    allowed = "coupled", *RULES
    if rule not in allowed:
        raise ValueError(f"rule={rule!r} is not known; allowed: {', '.join(allowed)}")
    if rule in CHAIN_RULES and not chain:
        trees = " or ".join(map(repr, TREE_RULES))
        raise ValueError(f"rule {rule!r} verifies chains; verify a tree with rejection_sample_method={trees}")
    nodes = draft.tokens.shape[1]
    present = jnp.broadcast_to(jnp.arange(nodes)[None] < draft.count[:, None], draft.tokens.shape)
    if draft.auxiliary is not None:
        present = present & ~draft.auxiliary
    # A token outside the vocabulary is a draft like any other whose target probability is zero.
    known = (draft.tokens >= 0) & (draft.tokens < vocab_size)
    tree = Tree(draft.tokens, draft.q, present, known, row_parents, depth, length)
    if rule == "coupled" or nodes == 0:
        return _pad(_coupled(logits, tree, sampling, vocab_size, history, wanted), logits.shape[1])
    if RULES[rule].independent and (draft.q is None or draft.q.without_replacement):
        raise ValueError(
            f"rule {rule!r} judges siblings that were drawn independently (draft_sample_method='probabilistic', with "
            f"replacement); these were not"
        )
    verdict = RULES[rule].function(Laws(logits, sampling, history, vocab_size), tree, *options)
    return _pad(verdict, logits.shape[1])


def _pad(v: Verification, width: int) -> Verification:
    """Pads the columns of a verification to the width of the flight."""

    def pad(x, value):
        return jnp.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=value)

    return Verification(pad(v.tokens, 0), v.num_accepted, pad(v.path, 0), pad(v.gaps, jnp.inf))


def _coupled(logits, tree: Tree, sampling, vocab_size, history, wanted) -> Verification:
    """The target chooses a token behind every row of the accepted path, which ends where no draft equals its choice."""
    batch, nodes = tree.tokens.shape
    index = jnp.arange(batch)

    def step(carry):
        column, row, alive, v = carry
        position = tree.length + tree.depth[index, row]
        token, gap = sampling_lib.choose_some(
            logits, index, row, position, sampling, vocab_size, history=history, wanted=alive
        )
        child = tree.valid & (tree.row_parents == row[:, None]) & (tree.tokens == token[:, None]) & alive[:, None]
        found = child.any(axis=1)
        v = Verification(
            v.tokens.at[:, column].set(token),
            v.num_accepted + found,
            v.path.at[:, column].set(row),
            v.gaps.at[:, column].set(gap),
        )
        return column + 1, jnp.where(found, jnp.argmax(child, axis=1) + 1, row) if nodes else row, found, v

    alive = jnp.ones(batch, bool) if wanted is None else wanted[:, 0]
    tokens = jnp.zeros((batch, nodes + 1), jnp.int32)
    blank = Verification(tokens, jnp.zeros(batch, jnp.int32), tokens, jnp.full(tokens.shape, jnp.inf, jnp.float32))
    carry = step((jnp.int32(0), jnp.zeros(batch, jnp.int32), alive, blank))
    if nodes:  # plain decoding needs no loop
        carry = lax.while_loop(lambda carry: carry[2].any(), step, carry)
    return carry[-1]
