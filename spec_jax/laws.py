"""The target's law behind one row in flight as a few numbers, from which the probability of any token is one look.

Rules ask for single probabilities far more often than for whole laws, and a law that is written out costs a pass over
the vocabulary, or a copy of the logits.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_jax import filters
from spec_jax import sampling as sampling_lib
from spec_jax.kernels import cpu
from spec_jax.processors import History
from spec_jax.rows import cond, over_rows
from spec_jax.sampling import SamplingState


@flax.struct.dataclass
class Law:
    """The processed law p of one row: exp((x - peak) / temperature - total) of the scores x that the filters leave.

    The peak is taken off first: at a low temperature x / temperature would have no digits left for what follows.

    Attributes:
      row, column, position: which row of the logits, and the position of the token to choose.
      temperature: float32, 1 in a greedy row.
      cutoff: float32, the least score that is not filtered out, see `filters.cutoff`.
      peak: float32, the best score; 0 where the options leave none.
      total: float32, log of the sum; inf where the options leave no token.
      best: int32, a greedy row's choice, which has all of the mass, or NO_TOKEN; UNSEEN in sampled rows.
      gap: float32, the lead of a greedy row's choice; inf in sampled rows.
      broken: bool, whether the logits hold NaN or +inf, from which no token can be chosen.
    """

    row: jax.Array
    column: jax.Array
    position: jax.Array
    temperature: jax.Array
    cutoff: jax.Array
    peak: jax.Array
    total: jax.Array
    best: jax.Array
    gap: jax.Array
    broken: jax.Array

    @property
    def empty(self) -> jax.Array:
        """Whether the options leave no token."""
        return jnp.where(self.best == sampling_lib.UNSEEN, self.total == jnp.inf, self.best == sampling_lib.NO_TOKEN)


@flax.struct.dataclass
class Laws:
    """The laws behind the rows in flight of one step.

    Attributes:
      logits: float32 [batch, width, vocab].
      sampling, history: as in `verify.verify`.
      vocab_size: ids at and beyond it are padding.
      known: the laws behind all rows [batch, width], see `prepared`.
    """

    logits: jax.Array
    sampling: SamplingState
    history: History | None
    vocab_size: int = flax.struct.field(pytree_node=False)
    known: Law | None = None

    def prepared(self, positions: jax.Array, wanted: jax.Array) -> Laws:
        """The same with the laws behind the rows that are `wanted` bool [batch, width] found at once, where the CPU
        kernels do so: for rules that look at most rows."""
        if not self.sampling.kernels or self.sampling.processors is not None:
            return self
        rows, columns = (x.reshape(-1) for x in jnp.indices(wanted.shape))
        wanted = wanted.reshape(-1)
        scores, index = sampling_lib.kernel_rows(self.logits, rows, columns, wanted)
        found = self._by_kernel(scores, index, rows, columns, positions.reshape(-1))
        return self.replace(known=jax.tree.map(lambda x: x.reshape(positions.shape), found))

    def _by_kernel(self, scores, index, rows, columns, positions) -> Law:
        """The laws of entries [n] of `scores` and `index` as kernels take them."""
        temperature = self.sampling.temperature[rows]
        cut = sampling_lib.kernel_cuts(scores, index, rows, self.sampling, self.vocab_size)
        peak, total, best, gap, broken = cpu.laws(scores, index, temperature, cut, self.vocab_size)
        soft = temperature > 0
        best, temperature = jnp.where(soft, sampling_lib.UNSEEN, best), jnp.where(soft, temperature, 1.0)
        cut = jnp.where(soft, cut, -jnp.inf)
        return Law(rows, columns, positions, temperature, cut, peak, total, best, gap, broken)

    def at(self, row: jax.Array, column: jax.Array, position: jax.Array) -> Law:
        """The law behind one row in flight: two passes over its logits where no filter is set."""
        s = self.sampling
        if self.known is not None:
            return jax.tree.map(lambda x: x[row, column], self.known)
        if s.kernels:
            rows, columns = row[None], column[None]
            if s.processors is None:
                entry = sampling_lib.kernel_rows(self.logits, rows, columns, jnp.ones(1, bool))
            else:
                entry = self._scores(row, column, position)[None], jnp.zeros(1, jnp.int32)
            law = jax.tree.map(lambda x: x[0], self._by_kernel(*entry, rows, columns, position[None]))
            return law if s.processors is None else law.replace(broken=self._broken(row, column))

        # Branches read the logits themselves: whatever is handed to a branch is copied first.
        def soft(row, column, position):
            temperature, scores = s.temperature[row], self._scores(row, column, position)
            peak = scores.max()

            def filtered(row, column, position, peak):
                scores, options = self._scores(row, column, position), (s.top_k[row], s.top_p[row], s.min_p[row])
                return filters.cutoff(scores, peak, s.temperature[row], *options)

            def unfiltered(row, column, position, peak):
                return filters.lowest(peak, s.temperature[row], s.min_p[row])

            any_filter = (s.top_k[row] > 0) | (s.top_p[row] < 1.0)
            low = cond(any_filter, filtered, unfiltered, row, column, position, peak)
            masses = jnp.where(scores >= low, jnp.exp((scores - peak) / temperature), 0.0)
            total, none = jnp.log(masses.sum()), peak == -jnp.inf
            peak, total = jnp.where(none, 0.0, peak), jnp.where(none, jnp.inf, total)
            unseen, infinite = jnp.int32(sampling_lib.UNSEEN), jnp.float32(jnp.inf)
            return temperature, low, peak, total, unseen, infinite, ~(peak < jnp.inf)

        def hard(row, column, position):
            scores = self._scores(row, column, position)
            best, gap = sampling_lib.best_token(scores)
            one, zero = jnp.float32(1), jnp.float32(0)
            return one, jnp.float32(-jnp.inf), zero, zero, best, gap, ~(scores.max() < jnp.inf)

        *found, broken = cond(s.temperature[row] > 0, soft, hard, row, column, position)
        if s.processors is not None:  # which may hide what is broken
            broken = self._broken(row, column)
        return Law(row, column, position, *found, broken)

    def probability(self, law: Law, token: jax.Array) -> jax.Array:
        """p of one token, 0 outside the vocabulary."""
        inside = (token >= 0) & (token < self.vocab_size)
        score = self._scores(law.row, law.column, law.position)[jnp.where(inside, token, 0)]
        p = jnp.where(score >= law.cutoff, jnp.exp((score - law.peak) / law.temperature - law.total), 0.0)
        p = jnp.where(law.best == sampling_lib.UNSEEN, p, token == law.best)
        return jnp.where(inside, p, 0.0)

    def probabilities(self, law: Law) -> jax.Array:
        """p of every token, float32 [vocab]; zeros where the options leave none."""
        scores = self._scores(law.row, law.column, law.position)
        masses = jnp.exp((scores - law.peak) / law.temperature - law.total)
        soft = jnp.where(scores >= law.cutoff, masses, 0.0)
        hard = jnp.arange(scores.shape[0]) == law.best
        return jnp.where(law.best == sampling_lib.UNSEEN, soft, hard)

    def lead(self, law: Law, token: jax.Array) -> jax.Array:
        """How far the score of a token lies below a greedy row's best one."""
        scores = self._scores(law.row, law.column, law.position)
        return scores.max() - scores[token]

    def draw(self, law: Law, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A token of the law that the weights [vocab] are proportional to, with the target's noise, and the lead of a
        greedy row's choice; NO_TOKEN where all are zero, and a flagged token where the logits are broken."""
        token = sampling_lib.draw(weights, self.sampling.key[law.row], law.position, sampling_lib.TARGET)
        return sampling_lib.flag_broken(law.broken, token, law.gap)

    def uniform(self, row: jax.Array, at: jax.Array) -> jax.Array:
        """The uniform of an acceptance test, keyed by a position or by a node."""
        return jax.random.uniform(sampling_lib.noise_key(self.sampling.key[row], at, sampling_lib.ACCEPT))

    def _broken(self, row, column) -> jax.Array:
        return sampling_lib.is_broken(self.logits[row, column], self.vocab_size)

    def _scores(self, row, column, position) -> jax.Array:
        """The scores [vocab] of one row. Wherever they are computed they must be the same to the last bit."""
        scores = sampling_lib.adjusted(
            self.logits[row, column], self.sampling, self.history, row, column, position, self.vocab_size
        )
        # Without options they are the logits. The arithmetic of options might be fused with what follows in one place
        # and not in another.
        return scores if self.sampling.processors is None else lax.optimization_barrier(scores)

    def over_rows(self, function: Callable, rows, columns, *arrays, **options):
        """`rows.over_rows` of (row, column, *arrays)."""
        return over_rows(
            lambda row, column, _, *more: function(row, column, *more), self.logits, rows, columns, *arrays, **options
        )
