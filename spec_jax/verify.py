"""Verification rules: which draft tokens are kept, and which token follows them. Pure functions of logits and keys.

`greedy` and `coupled` (Gumbel-max with noise keyed by position) let the target choose a token at every row in flight
and keep the drafts that equal its choice: every emitted token is the target's own, so the text cannot depend on the
drafter. `standard` is the modified rejection sampling of Leviathan et al. (https://arxiv.org/abs/2211.17192) and Chen
et al. (https://arxiv.org/abs/2302.01318): more drafts are kept, and the law is the target's.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_jax import sampling as sampling_lib
from spec_jax.drafting.base import Draft, DraftProbs
from spec_jax.processors import History
from spec_jax.sampling import SamplingState

NEAR_TIE = {"float32": 2e-4, "bfloat16": 1.5}
"""Lead of the chosen token under which a choice counts as a near-tie: twice the largest difference measured between
the logits of one token at different row counts (SmolLM2-135M, CPU: 8e-5 in float32, 0.75 in bfloat16). A sampled
choice is judged by its lead in logits, that is times the temperature; tokens at the edge of a filter, and sampled rows
under `standard`, are not judged."""


@flax.struct.dataclass
class Verification:
    """The outcome of one step.

    Attributes:
      tokens: int32 [batch, width], the accepted draft tokens and then the next token; columns beyond it are padding.
      num_accepted: int32 [batch], draft tokens accepted; tokens[:, num_accepted] is the bonus or residual token.
      path: int32 [batch, width], the rows in flight along the accepted path; path[:, 0] = 0 is the last token.
      gaps: float32 [batch, width], lead of each chosen token over the runner-up; inf where the rule has none
        (sampled rows under `standard`).
    """

    tokens: jax.Array
    num_accepted: jax.Array
    path: jax.Array
    gaps: jax.Array


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
) -> Verification:
    """Applies `rule` to one step.

    Args:
      rule: "coupled" (greedy where the temperature is 0) or "standard".
      logits: float32 [batch, width, vocab] of the rows in flight; row 0 follows the last committed token.
      draft: the proposals; node i is row i + 1. Ids outside the vocabulary are refused.
      row_parents: int32 [batch, nodes], the row that each node is a child of.
      depth: int32 [batch, width] depth of every row.
      chain: whether the nodes that can be accepted form a chain in rows 1, 2, ...
      length: int32 [batch], committed tokens: the position of the first token to emit.
      vocab_size: ids at and beyond it are padding.
      history: what precedes the token that follows each row, where `sampling.processors` asks for it.
      wanted: bool [batch, width], rows that can be on an accepted path; None: all. The others are not looked at.

    Raises:
      ValueError: for an unknown rule, or a rule that cannot verify a tree.
    """
    if rule == "standard" and not chain:
        raise ValueError("rule 'standard' verifies chains; verify a tree with rejection_sample_method='coupled'")
    if rule not in ("standard", "coupled"):
        raise ValueError(f"rule={rule!r} is not known; allowed: coupled, standard")
    nodes = draft.tokens.shape[1]
    # A token outside the vocabulary is a draft like any other whose target probability is zero.
    known = (draft.tokens >= 0) & (draft.tokens < vocab_size)
    valid = (jnp.arange(nodes)[None] < draft.count[:, None]) & known
    if draft.auxiliary is not None:
        valid = valid & ~draft.auxiliary
    if rule == "coupled" or nodes == 0:
        # Rows behind the last node are padding: they choose nothing.
        used = logits[:, : nodes + 1]
        positions = length[:, None] + depth[:, : nodes + 1]
        wanted = None if wanted is None else wanted[:, : nodes + 1]
        chosen, gaps = sampling_lib.choose_tokens(used, positions, sampling, vocab_size, history=history, wanted=wanted)
        walk = _match_chain if chain else _match_tree
        return _pad(walk(chosen, gaps, draft.tokens, valid, row_parents), logits.shape[1])
    return _pad(_standard(logits, draft, valid, length, sampling, vocab_size, history), logits.shape[1])


def _pad(v: Verification, width: int) -> Verification:
    """Pads the columns of a verification to the width of the flight."""

    def pad(x, value):
        return jnp.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=value)

    return Verification(pad(v.tokens, 0), v.num_accepted, pad(v.path, 0), pad(v.gaps, jnp.inf))


def _match_chain(chosen, gaps, tokens, valid, row_parents) -> Verification:
    batch, rows = chosen.shape
    match = (tokens == chosen[:, :-1]) & valid
    num_accepted = jnp.cumprod(match.astype(jnp.int32), axis=1).sum(axis=1)
    path = jnp.broadcast_to(jnp.arange(rows), (batch, rows))
    return Verification(chosen, num_accepted, path, gaps)


def _match_tree(chosen, gaps, tokens, valid, row_parents) -> Verification:
    """Walks from the root to the child that equals the target's choice, until there is none."""
    batch, rows = chosen.shape
    index = jnp.arange(batch)

    def step(carry, _):
        row, alive, accepted = carry
        want = chosen[index, row]
        child = valid & (row_parents == row[:, None]) & (tokens == want[:, None]) & alive[:, None]
        found = child.any(axis=1)
        node = jnp.argmax(child, axis=1) + 1
        out = (want, row, gaps[index, row])
        return (jnp.where(found, node, row), found, accepted + found), out

    start = (jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool), jnp.zeros(batch, jnp.int32))
    (_, _, accepted), (emitted, path, lead) = lax.scan(step, start, None, length=rows)
    return Verification(emitted.T, accepted, path.T, lead.T)


def acceptance_probability(p: jax.Array, q: jax.Array) -> jax.Array:
    """min(1, p(x)/q(x)) of a token with target probability p and draft probability q; 1 where q is 0 and p is not."""
    return jnp.where(q > 0, jnp.minimum(1.0, p / jnp.where(q > 0, q, 1.0)), jnp.where(p > 0, 1.0, 0.0))


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """The unnormalised residual max(p - q, 0) [..., vocab], or p itself where rounding left nothing of it."""
    rest = jnp.maximum(p - q, 0.0)
    return jnp.where(rest.sum(axis=-1, keepdims=True) > 0, rest, p)


def _standard(logits, draft, valid, length, sampling, vocab_size, history) -> Verification:
    batch, nodes = draft.tokens.shape
    vocab = logits.shape[-1]
    s = sampling

    def accept(want, *row):
        return lax.cond(want, lambda: look(*row), lambda: (jnp.bool_(False), jnp.float32(jnp.inf)))

    def look(row, column, logits, token, draft_prob, position):
        """Whether one draft token passes its own test. Greedy rows accept the argmax only, broken ones nothing."""
        broken = sampling_lib.is_broken(logits, vocab_size)
        logits = sampling_lib.adjusted(logits, s, history, row, column, position, vocab_size)

        def sampled():
            scores = sampling_lib.processed(logits, s, row)
            p = jnp.exp(scores[token] - jax.nn.logsumexp(scores))  # NaN, and so refused, where no token is left
            u = jax.random.uniform(sampling_lib.noise_key(s.key[row], position, sampling_lib.ACCEPT))
            return u < acceptance_probability(p, draft_prob), jnp.float32(jnp.inf)

        def greedy():
            best, gap = sampling_lib.best_token(logits)
            return token == best, gap

        passed, gap = lax.cond(s.temperature[row] > 0, sampled, greedy)
        return passed & ~broken, gap

    rows, columns = (x.reshape(-1) for x in jnp.indices((batch, nodes)))
    positions = length[:, None] + jnp.arange(nodes)
    passed, gaps = sampling_lib.over_rows(
        accept,
        valid.reshape(-1),
        rows,
        columns,
        logits[:, :nodes].reshape(-1, vocab),
        draft.tokens.reshape(-1),
        _draft_probability(draft).reshape(-1),
        positions.reshape(-1),
    )
    passed, gaps = passed.reshape(batch, nodes), gaps.reshape(batch, nodes)
    num_accepted = jnp.cumprod((passed & valid).astype(jnp.int32), axis=1).sum(axis=1)

    # The next token: from the residual where a real draft was refused, else from the target itself.
    index = jnp.arange(batch)
    refused = num_accepted < draft.count
    at = jnp.minimum(num_accepted, nodes - 1)
    token = draft.tokens[index, at]
    q = _draft_law(draft, at, token, vocab)

    def choose(row, column, logits, q, refused, position):
        broken = sampling_lib.is_broken(logits, vocab_size)
        logits = sampling_lib.adjusted(logits, s, history, row, column, position, vocab_size)

        def sampled():
            scores = sampling_lib.processed(logits, s, row)
            none_left = scores.max() == -jnp.inf
            scores = jnp.where(refused & ~none_left, jnp.log(residual(jax.nn.softmax(scores), q)), scores)
            noise = sampling_lib.gumbel(s.key[row], position, sampling_lib.TARGET, vocab)
            return sampling_lib.best_token(scores + noise)[0], jnp.float32(jnp.inf)

        choice = lax.cond(s.temperature[row] > 0, sampled, lambda: sampling_lib.best_token(logits))
        return sampling_lib.flag_broken(broken, *choice)

    follow, lead = sampling_lib.over_rows(
        choose, index, num_accepted, logits[index, num_accepted], q, refused, length + num_accepted
    )
    column = jnp.arange(nodes + 1)
    drafted = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(column < num_accepted[:, None], drafted, follow[:, None])
    gaps = jnp.where(column < num_accepted[:, None], jnp.pad(gaps, ((0, 0), (0, 1))), lead[:, None])
    path = jnp.broadcast_to(column, tokens.shape)
    return Verification(tokens, num_accepted, path, gaps)


def _draft_probability(draft: Draft) -> jax.Array:
    """q(x_i) of every node, float32 [batch, nodes]; 1 where the node was chosen deterministically."""
    batch, nodes = draft.tokens.shape
    q = draft.q
    if q is None:
        return jnp.ones((batch, nodes), jnp.float32)
    if q.ids is None:
        prob = jnp.take_along_axis(q.probs[:, :nodes], draft.tokens[..., None], axis=-1)[..., 0]
    else:
        hit = q.ids[:, :nodes] == draft.tokens[..., None]
        prob = jnp.where(hit, q.probs[:, :nodes], 0.0).sum(-1)
    return prob if q.one_hot is None else jnp.where(q.one_hot[:, :nodes], 1.0, prob)


def _draft_law(draft: Draft, at: jax.Array, token: jax.Array, vocab: int) -> jax.Array:
    """The law q [batch, vocab] that node `at` [batch] was drawn from."""
    batch = at.shape[0]
    index = jnp.arange(batch)
    point = jax.nn.one_hot(token, vocab, dtype=jnp.float32)
    q: DraftProbs | None = draft.q
    if q is None:
        return point
    law = q.probs[index, at]
    if q.ids is not None:
        law = jnp.zeros((batch, vocab), jnp.float32).at[index[:, None], q.ids[index, at]].add(law, mode="drop")
    return law if q.one_hot is None else jnp.where(q.one_hot[index, at][:, None], point, law)
