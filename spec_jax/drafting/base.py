"""The drafter protocol: what every family implements, and what the decode loop hands it.

A drafter is a frozen, hashable dataclass (static under jit) with three pure functions; its arrays live in `params` and
`state`. The loop and the verification rules know nothing else about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_jax import sampling as sampling_lib
from spec_jax.cache import KVCache
from spec_jax.draft_policies import StopRule
from spec_jax.in_place import run_if
from spec_jax.models.layers import RowBlocks
from spec_jax.processors import NOTHING, Committed, read_draft
from spec_jax.sampling import SamplingState


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a drafter wants from the target's forward passes.

    Attributes:
      features: layers whose outputs `commit` receives; i is layer i's output, -1 the final norm's.
      prefill_logits: whether `commit` also receives the logits of prefill chunks (the head then runs on the prompt).
      slots: rows that `propose` has in flight, from the last committed token on, where they may be more than the width.
    """

    features: tuple[int, ...] = ()
    prefill_logits: bool = False
    slots: int = 0


@flax.struct.dataclass
class DraftProbs:
    """The laws q that draft tokens were sampled from. Row w is the law of the children of row w (0: the last token).

    Attributes:
      probs: float32 [batch, rows, vocab], or [batch, rows, m] together with `ids`.
      ids: int32 [batch, rows, m], the support of a sparse law; None: dense. Ids of one row are distinct.
      one_hot: bool [batch, rows], True where the children were chosen deterministically, whatever `probs` says.
      without_replacement: whether siblings were drawn one after another from what was left, so that no two are equal;
        else each from the whole law.
    """

    probs: jax.Array
    ids: jax.Array | None = None
    one_hot: jax.Array | None = None
    without_replacement: bool = flax.struct.field(pytree_node=False, default=False)


@flax.struct.dataclass
class ExitStates:
    """Outputs of the target's layer `layer` - 1, with whose K/V in `Draft.target_cache` verification begins there.

    They must be what verification would compute: bit for bit where the run promises exactness, see
    `TargetView.reusable`.

    Attributes:
      hidden: [batch, 1 + nodes, embed], of the last committed token and of every node.
      known: bool [], False where this step has no proposal; verification runs all layers then.
      layer: the first layer that is left to run.
    """

    hidden: jax.Array
    known: jax.Array
    layer: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Draft:
    """What a drafter proposes for one step.

    Attributes:
      tokens: int32 [batch, nodes].
      count: int32 [batch], the leading nodes that are real proposals; the rest is padding.
      q: None where every node was chosen deterministically, else the laws they were drawn from.
      parents: int32 [nodes] or [batch, nodes] of a `dynamic_tree` drafter; None: the drafter's static `parents`.
      auxiliary: bool [nodes], rows that ride along in the forward pass and are never accepted; they follow the others.
      target_cache: the target's cache, where the drafter wrote to it beyond `length`; verification writes it again.
      kind: int32 [batch], which kind of proposal this is, an index of the drafter's `priors`; None: there is but one.
      score: float32 [batch], accepted tokens that the drafter expects; None: it does not say.
      exit: what the target's first layers have computed already; None: nothing.
    """

    tokens: jax.Array
    count: jax.Array
    q: DraftProbs | None = None
    parents: jax.Array | None = None
    auxiliary: jax.Array | None = None
    target_cache: KVCache | None = None
    kind: jax.Array | None = None
    score: jax.Array | None = None
    exit: ExitStates | None = None

    @classmethod
    def empty_like(cls, shape: Draft, cache: KVCache) -> Draft:
        """A draft of nothing, in the shape of a proposal; `cache`: the target's, where the proposal has one."""
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape.replace(target_cache=None))
        return empty.replace(target_cache=None if shape.target_cache is None else cache)


def propose_if(
    predicate: jax.Array, propose: Callable[[KVCache, Any], tuple[Draft, Any]], cache: KVCache, state: Any
) -> tuple[Draft, Any]:
    """`propose(cache, state)` where `predicate` holds, else an empty draft of its shape and the state unchanged.

    Args:
      cache: the target's, which proposals of some drafters have written to; `propose` must take it from here.
      state: the drafter's, of the same structure before and after a proposal.
    """
    shape, _ = jax.eval_shape(propose, cache, state)

    def run(carry):
        draft, state = carry
        return propose(cache if draft.target_cache is None else draft.target_cache, state)

    return run_if(predicate, run, (Draft.empty_like(shape, cache), state))


@flax.struct.dataclass
class Seen:
    """What the target has just processed and the loop has committed: a prefill chunk or an accepted run.

    Attributes:
      tokens: int32 [batch, rows], the tokens fed, in text order.
      next_tokens: int32 [batch, rows], the committed token that follows each.
      start: int32 [batch], absolute position of tokens[:, 0].
      count: int32 [batch], the leading rows that are committed (0 for a finished row).
      features: {layer: [batch, rows, embed]} along the accepted path, in the same order.
      logits: float32 [batch, width, vocab] of every row in flight, None for a prefill chunk unless asked for. Rows of
        nodes that were not verified (beyond the draft's count) hold anything, NaN too; their features are zeros.
      path: int32 [batch, rows], the row in flight that each token came from.
      prefill: whether this is a chunk of the prompt; every row's earlier chunks have been seen.
      drafted: int32 [batch], draft nodes that were verified; None for a prefill chunk.
      own: bool [batch], rows whose run was verified from this drafter's own proposal, as all are (None) but those of a
        part of a hybrid.
    """

    tokens: jax.Array
    next_tokens: jax.Array
    start: jax.Array
    count: jax.Array
    features: dict[int, jax.Array]
    logits: jax.Array | None
    path: jax.Array
    prefill: bool = flax.struct.field(pytree_node=False)
    drafted: jax.Array | None = None
    own: jax.Array | None = None


@flax.struct.dataclass
class TargetView:
    """The target as drafters may use it: a static module with its parameters and canonical row blocks."""

    params: Any
    module: Any = flax.struct.field(pytree_node=False)
    rows: RowBlocks = flax.struct.field(pytree_node=False)
    vocab_size: int = flax.struct.field(pytree_node=False)

    @property
    def reusable(self) -> bool:
        """Whether what a drafter computes with the target's layers has the bits that verification would compute, or
        none are promised. Under E1 bits depend on the width, and a drafter's is another one."""
        return self.rows.any_width or self.module.packed or not self.rows.canonical


@flax.struct.dataclass
class View:
    """What `propose` sees.

    Attributes:
      tokens: int32 [batch, capacity], committed tokens (prompt and output).
      length: int32 [batch], how many are committed; at least 1.
      last: int32 [batch], the last committed token, not yet in the target's cache.
      room: int32 [batch], tokens that may still be emitted.
      live: bool [batch], rows that still decode.
      cache: the target's cache, length - 1 slots committed.
      sampling: the rows' sampling parameters and keys.
      target: the target's module and parameters.
      rule: the verification rule in force.
      committed: what the options need to know of the committed text; None where no row uses any.
      grammar_states: per grammar its state in front of `last`.
      first: bool [batch], whether `last` is the last token of the prompt.
      wanted: int32 [batch], draft tokens that will be verified at most; None: as many as there are.
      stop: when a model stops drafting; None: not before its last token.
    """

    tokens: jax.Array
    length: jax.Array
    last: jax.Array
    room: jax.Array
    live: jax.Array
    cache: KVCache
    sampling: SamplingState
    target: TargetView
    rule: str = flax.struct.field(pytree_node=False)
    committed: Committed | None = None
    grammar_states: tuple[Any, ...] = ()
    first: jax.Array | None = None
    wanted: jax.Array | None = None
    stop: StopRule | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def draft_purpose(self) -> int:
        """Noise a drafter samples with: the target's own under `coupled`, independent noise otherwise."""
        return sampling_lib.TARGET if self.rule == "coupled" else sampling_lib.DRAFT


@runtime_checkable
class Drafter(Protocol):
    """One drafter family.

    Attributes:
      num_nodes: draft nodes per step, auxiliary ones included; 0 drafts nothing.
      parents: parents of the nodes, -1 for children of the last committed token; None: a chain.
      dynamic_tree: whether `propose` returns parents of its own.
      needs: what `commit` wants from the target.
      priors: per kind of proposal the acceptance rate to assume before any was verified; a draft length policy keeps
        the kinds' acceptance apart, see `Draft.kind`.
    """

    num_nodes: int
    parents: tuple[int, ...] | None
    dynamic_tree: bool
    needs: Needs
    priors: tuple[float, ...]

    def init(self, params: Any, target: TargetView, batch: int, capacity: int) -> Any:
        """The state before anything was seen, a pytree of fixed shape."""

    def commit(self, params: Any, state: Any, seen: Seen) -> Any:
        """Feeds committed tokens: every prefill chunk and every accepted run. Exact for every count."""

    def propose(self, params: Any, state: Any, view: View) -> tuple[Draft, Any]:
        """Proposes up to `num_nodes` tokens behind the last committed one."""

    def for_prefill(self) -> Drafter:
        """A drafter with the same `init`, prefill `commit`, `fill` and features, so that these share one program."""

    def fill(self, state: Any, one: Any, put: Callable[[jax.Array, jax.Array], jax.Array]) -> Any:
        """The state of a batch some of whose rows start anew from `one`, the state of a batch of one behind its prompt.

        `put(whole, one)` writes one leaf [1, ...] to these rows of a leaf [batch, ...].
        """

    def take(self, state: Any, slot: jax.Array) -> Any:
        """The state of one row as a batch of one: what `commit` needs to feed this row further tokens."""

    def grow(self, state: Any, capacity: int) -> Any:
        """The state with room for `capacity` tokens, as `init` would have made it; None where that cannot be done."""


class BaseDrafter:
    """Defaults for drafters that need less than the whole protocol: a chain, no needs, no state.

    Attributes:
      remark: what `Stats.remark` says of every call; empty: nothing.
    """

    remark: str = ""
    parents: tuple[int, ...] | None = None
    dynamic_tree: bool = False
    needs: Needs = Needs()
    priors: tuple[float, ...] = (0.7,)

    def init(self, params, target, batch, capacity):
        return ()

    def commit(self, params, state, seen):
        return state

    def for_prefill(self):
        stateless = type(self).init is BaseDrafter.init and type(self).commit is BaseDrafter.commit
        return NoDrafter() if stateless and self.needs == Needs(slots=self.needs.slots) else self

    def fill(self, state, one, put):
        """Right for every state whose leaves all have the batch as their leading axis."""
        sizes = [(x.shape, y.shape) for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(one), strict=True)]
        if any(not y or y[0] != 1 or x[1:] != y[1:] for x, y in sizes):
            raise ValueError(f"{type(self).__name__} has state whose leading axis is not the batch; override `fill` "
                             f"and `take`: {sizes}")  # fmt: skip
        return jax.tree.map(put, state, one)

    def take(self, state, slot):
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, slot, 1), state)

    def grow(self, state, capacity):
        return state if not jax.tree.leaves(state) else None


@dataclasses.dataclass(frozen=True)
class NoDrafter(BaseDrafter):
    """Plain decoding: drafts nothing, in the same loop."""

    num_nodes: int = 0

    def propose(self, params, state, view):
        raise ValueError("plain decoding proposes nothing")  # the loop never calls it with num_nodes == 0


@flax.struct.dataclass
class Proposal:
    """What an autoregressive drafter has drafted.

    Attributes:
      tokens: int32 [batch, k].
      probs: their laws [batch, k, vocab], where they were sampled.
      count: int32 [batch], the leading tokens that are proposed.
      steps: int32, tokens that were drafted in every row, proposed or not.
    """

    tokens: jax.Array
    probs: jax.Array | None
    count: jax.Array
    steps: jax.Array


def draft_chain(
    next_logits: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]],
    carry: Any,
    first: jax.Array,
    view: View,
    steps: int,
    sample: bool,
    vocab_size: int,
) -> tuple[Proposal, Any]:
    """Drafts a chain token by token, inside one loop, until every row has what is wanted or has stopped by itself.

    Args:
      next_logits: (carry, token [batch], step) -> (logits float32 [batch, vocab], carry).
      first: int32 [batch], the last committed token.
      steps: K.
      sample: draw from the processed distribution and return it as q. Otherwise the draft is the argmax, or under
        `coupled` the token that the target's own noise picks from the drafter's distribution. Either way behind the
        options that hold for the target too, or it would propose what the target may not say.
      vocab_size: ids at and beyond it are never proposed.
    """
    keep_q = sample and view.rule != "coupled"
    purpose = view.draft_purpose if keep_q or view.rule == "coupled" else None
    processors, batch = view.sampling.processors, first.shape[0]
    most = jnp.full(batch, steps) if view.wanted is None else jnp.where(view.live, view.wanted, 0)

    def step(carry, index):
        token, path, states, open_to, survival, inner = carry
        logits, inner = next_logits(inner, jnp.maximum(token, 0), index)  # NO_TOKEN would index from the end
        fed = token if processors is None else jnp.where(view.first & (index == 0), NOTHING, token)
        history = read_draft(processors, view.committed, path, index, fed, states)
        position = view.length + index
        chosen, _ = sampling_lib.choose_tokens(
            logits[:, None], position[:, None], view.sampling, vocab_size, purpose, history
        )
        token = chosen[:, 0]
        probs = sampling_lib.probabilities(logits, position, view.sampling, vocab_size, history) if keep_q else None
        if history is not None:
            path = path.at[:, index].set(token)
            states = jax.tree.map(lambda x: x[:, 0], history.after)
        counted, open_to = open_to, open_to & (index + 1 < most)
        if view.stop is not None:
            raw = sampling_lib.mask_padding(logits.astype(jnp.float32), vocab_size)
            score = jnp.take_along_axis(raw, jnp.maximum(token, 0)[:, None], axis=1)[:, 0]
            confidence = jnp.exp(score - jax.nn.logsumexp(raw, axis=1))
            survival = survival * confidence
            open_to = open_to & view.stop.goes_on(survival, confidence)
        return (token, path, states, open_to, survival, inner), (token, probs, counted)

    path = jnp.full((batch, steps), NOTHING, jnp.int32)
    start = (first, path, view.grammar_states, most > 0, jnp.ones(batch), carry)
    if view.wanted is None and view.stop is None:
        (*_, carry), (tokens, probs, _) = lax.scan(step, start, jnp.arange(steps))
        tokens, probs = tokens.T, None if probs is None else jnp.moveaxis(probs, 0, 1)
        return Proposal(tokens, probs, jnp.full(batch, steps, jnp.int32), jnp.int32(steps)), carry
    shapes = jax.eval_shape(step, start, jnp.int32(0))[1]
    found = jax.tree.map(lambda x: jnp.zeros((batch, steps, *x.shape[1:]), x.dtype), shapes)

    def unfinished(loop):
        index, inner, _ = loop
        return (index < steps) & (inner[3] & view.live).any()

    def draft(loop):
        index, inner, found = loop
        inner, one = step(inner, index)
        return index + 1, inner, jax.tree.map(lambda x, y: x.at[:, index].set(y), found, one)

    ran, (*_, carry), (tokens, probs, counted) = lax.while_loop(unfinished, draft, (jnp.int32(0), start, found))
    return Proposal(tokens, probs, counted.sum(axis=1, dtype=jnp.int32), ran), carry
