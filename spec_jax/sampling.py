"""From logits to a token: processors, noise keys and Gumbel-max sampling, one row of the vocabulary at a time.

Noise is keyed by (seed, absolute position, purpose) and never by step or batch slot, so a row's text depends only on
its own prompt and parameters.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax import processors as processors_lib
from spec_jax.filters import any_filter, process
from spec_jax.kernels import cpu
from spec_jax.processors import History, Processors
from spec_jax.rows import cond, over_rows

ACCEPT, TARGET, DRAFT, ROUND = 0, 1, 2, 3
"""Purposes of noise: acceptance uniforms; the target's own Gumbel noise (plain, bonus, residual); the drafter's."""
UNSEEN = -2
"""In place of a token that was not chosen because its row is of no use; equal to no draft token."""
NO_TOKEN = -1
"""In place of a token where the options leave none to choose; equal to no draft token."""
BLOCK = 256
"""Ids among which `best_token` looks for the best one first."""


@flax.struct.dataclass
class SamplingState:
    """`SamplingParams` of every row as arrays, so that other values never recompile.

    Attributes:
      temperature, top_p, min_p: float32 [batch]; temperature 0 is greedy.
      top_k: int32 [batch], 0 for all.
      key: typed PRNG keys [batch], from the rows' seeds.
      stop_ids: int32 [batch, stops], padded with -1.
      processors: the options that depend on the text, None where no row uses any.
      kernels: whether the CPU kernels choose tokens, as they do where they run the target, see `with_kernels`.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    key: jax.Array
    stop_ids: jax.Array
    processors: Processors | None = None
    kernels: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def filtered(self) -> jax.Array:
        """bool [batch], rows that are sampled from less than the whole vocabulary."""
        return any_filter(self.temperature, self.top_k, self.top_p, self.min_p)

    def with_kernels(self, wanted: bool) -> SamplingState:
        """The same with CPU kernels, if `wanted` and if they make the noise that JAX is configured for."""
        threefry = str(jax.random.key_impl(self.key)) == "threefry2x32" and jax.config.jax_threefry_partitionable
        return self.replace(kernels=wanted and threefry and not jax.config.jax_high_dynamic_range_gumbel)


def noise_key(key: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    """The key of one row's noise at an absolute position for one purpose."""
    return jax.random.fold_in(jax.random.fold_in(key, position), purpose)


def processed(logits: jax.Array, sampling: SamplingState, row: jax.Array) -> jax.Array:
    """`filters.process` with the parameters of one row of the batch."""
    s = sampling
    return process(logits, s.temperature[row], s.top_k[row], s.top_p[row], s.min_p[row], s.kernels)


def mask_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """-inf at the ids beyond the vocabulary, which only pad the embedding. logits [..., vocab]."""
    if logits.shape[-1] <= vocab_size:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)


def gumbel(key: jax.Array, position: jax.Array, purpose: int, size: int) -> jax.Array:
    """Standard Gumbel noise float32 [size] of one row at one position."""
    return jax.random.gumbel(noise_key(key, position, purpose), (size,), jnp.float32)


def best_token(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The id of the largest score (ties: the lowest id) and its lead over the runner-up. scores [vocab].

    NO_TOKEN where every score is -inf.
    """
    # One pass finds the best of every block, and the rest is looked up there: an argmax over a vocabulary takes XLA's
    # CPU code four times as long as a maximum.
    blocks = jnp.pad(scores, (0, -scores.shape[0] % BLOCK), constant_values=-jnp.inf).reshape(-1, BLOCK)
    tops = blocks.max(axis=1)
    at = jnp.argmax(tops)
    block = blocks[at]
    best = jnp.argmax(block)
    peak = block[best]
    rest = jnp.maximum(_without(tops, at).max(), _without(block, best).max())
    lead = jnp.where(rest == -jnp.inf, jnp.inf, peak - rest)
    return jnp.where(peak == -jnp.inf, NO_TOKEN, at * BLOCK + best).astype(jnp.int32), lead


def _without(scores: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.where(jnp.arange(scores.shape[0]) == index, -jnp.inf, scores)


def draw(weights: jax.Array, key: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    """One token of the law that the weights [vocab] are proportional to; NO_TOKEN where all are zero.

    First a block of ids and then one of its ids, so that a draw takes little noise: making noise for every id costs a
    CPU more than the rest of a rule. Nobody shares the noise, so how it enters matters to the law alone.
    """
    size = min(BLOCK, weights.shape[0])
    blocks = jnp.pad(weights, (0, -weights.shape[0] % size)).reshape(-1, size)
    totals = blocks.sum(axis=1)
    noise = gumbel(key, position, purpose, totals.shape[0] + size)
    block = jnp.argmax(jnp.log(totals) + noise[size:])
    token = block * size + jnp.argmax(jnp.log(blocks[block]) + noise[:size])
    return jnp.where(totals[block] > 0, token, NO_TOKEN).astype(jnp.int32)


def is_broken(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Whether a row of raw logits [vocab] holds NaN or +inf, from which no token can be chosen."""
    return ~(mask_padding(logits, vocab_size) < jnp.inf).all()


def flag_broken(broken: jax.Array, token: jax.Array, gap: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A choice as it is, or token 0 with a gap of NaN: a token that is emitted, so that its trace tells."""
    return jnp.where(broken, 0, token), jnp.where(broken, jnp.nan, gap)


def adjusted(logits, sampling: SamplingState, history: History | None, row, column, position, vocab_size) -> jax.Array:
    """The logits [vocab] of one row in flight after every option that holds at temperature 0 too."""
    logits = mask_padding(logits.astype(jnp.float32), vocab_size)
    return processors_lib.adjust(logits, sampling.processors, history, sampling.stop_ids, row, column, position)


def choose_tokens(
    logits: jax.Array,
    positions: jax.Array,
    sampling: SamplingState,
    vocab_size: int,
    purpose: int | None = TARGET,
    history: History | None = None,
    wanted: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The token each row chooses: the argmax where the temperature is 0, else Gumbel-max over the processed logits.

    Args:
      logits: float32 [batch, width, vocab].
      positions: int32 [batch, width], absolute positions of the tokens to choose; they key the noise.
      purpose: of the noise; None chooses the argmax in every row.
      history: what precedes the tokens, where `sampling.processors` asks for it.
      wanted: bool [batch, width], rows that choose; None: all. The others cost nothing on a CPU, and get UNSEEN.

    Returns:
      tokens int32 [batch, width], NO_TOKEN where the options leave none, and gaps float32 [batch, width], the lead of
      the choice over the runner-up in units of the logits, NaN where the logits are.
    """
    batch, width = logits.shape[:2]
    rows, columns = (x.reshape(-1) for x in jnp.indices((batch, width)))
    wanted = None if wanted is None else wanted.reshape(-1)
    tokens, gaps = choose_some(
        logits, rows, columns, positions.reshape(-1), sampling, vocab_size, purpose, history, wanted
    )
    return tokens.reshape(batch, width), gaps.reshape(batch, width)


def choose_some(
    logits: jax.Array,
    rows: jax.Array,
    columns: jax.Array,
    positions: jax.Array,
    sampling: SamplingState,
    vocab_size: int,
    purpose: int | None = TARGET,
    history: History | None = None,
    wanted: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`choose_tokens` of some rows: `rows`, `columns`, `positions` and `wanted` are [n], and so are the results."""
    vocab, s = logits.shape[-1], sampling
    if s.kernels:
        return _chosen_by_kernels(logits, rows, columns, positions, s, vocab_size, purpose, history, wanted)

    def choose(row, column, logits, position):
        broken = is_broken(logits, vocab_size)
        logits = adjusted(logits, s, history, row, column, position, vocab_size)
        if purpose is None:
            return flag_broken(broken, *best_token(logits))

        def sample(logits, row, position):
            scores = processed(logits, s, row)
            token, gap = best_token(scores + gumbel(s.key[row], position, purpose, vocab))
            return token, gap * s.temperature[row]

        sampled = s.temperature[row] > 0
        return flag_broken(broken, *cond(sampled, sample, lambda x, *_: best_token(x), logits, row, position))

    nothing = jnp.int32(UNSEEN), jnp.float32(jnp.inf)
    return over_rows(choose, logits, rows, columns, positions, wanted=wanted, nothing=nothing)


def _chosen_by_kernels(logits, rows, columns, positions, s: SamplingState, vocab_size, purpose, history, wanted):
    """`choose_some` with the same noise, made a vector at a time and on all cores (`kernels.cpu.choice`)."""
    logits, vocab_size = logits.astype(jnp.float32), min(vocab_size, logits.shape[-1])
    wanted = jnp.ones(rows.shape, bool) if wanted is None else wanted
    temperature = s.temperature * 0 if purpose is None else s.temperature
    s = s.replace(temperature=temperature)
    keys = jax.vmap(lambda row, position: noise_key(s.key[row], position, purpose or 0))(rows, positions)
    keys = jax.random.key_data(keys)

    if s.processors is None:
        entries = kernel_rows(logits, rows, columns, wanted)
        cut = kernel_cuts(*entries, rows, s, vocab_size)
        tokens, gaps = cpu.choice(*entries, temperature[rows], cut, keys, vocab_size)
    else:  # their scores are made a row at a time

        def choose(row, column, logits, position, key):
            scores = adjusted(logits, s, history, row, column, position, vocab_size)
            entry, of = (scores[None], jnp.zeros(1, jnp.int32)), row[None]
            cut = kernel_cuts(*entry, of, s, vocab_size)
            token, gap = cpu.choice(*entry, temperature[of], cut, key[None], vocab_size)
            return flag_broken(is_broken(logits, vocab_size), token[0], gap[0])

        nothing = jnp.int32(UNSEEN), jnp.float32(jnp.inf)
        tokens, gaps = over_rows(choose, logits, rows, columns, positions, keys, wanted=wanted, nothing=nothing)
    return jnp.where(wanted, tokens, UNSEEN), gaps


def kernel_cuts(scores: jax.Array, index: jax.Array, rows, sampling: SamplingState, vocab_size: int) -> jax.Array:
    """The least scores that the filters of sequences `rows` [n] leave, of `scores` and `index` as kernels take them."""
    s = sampling
    index = jnp.where(s.filtered[rows], index, -1)
    return cpu.cuts(scores, index, s.temperature[rows], s.top_k[rows], s.top_p[rows], s.min_p[rows], vocab_size)


def kernel_rows(logits: jax.Array, rows, columns, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """logits [batch, width, vocab] and entries [n] as the CPU kernels want them, without a copy."""
    batch, width, vocab = logits.shape
    return logits.reshape(-1, vocab), jnp.where(wanted, rows * width + columns, -1).astype(jnp.int32)


def softmax(scores: jax.Array) -> jax.Array:
    """The probabilities float32 [vocab] of processed logits; zeros where the options leave no token."""
    return jnp.where(scores.max() == -jnp.inf, 0.0, jax.nn.softmax(scores))


def of_round(sampling: SamplingState, length: jax.Array) -> SamplingState:
    """The rows' parameters with keys that belong to the round that begins behind `length` committed tokens.

    For rules that look beyond the first rejection: a position that such a round has looked at and not committed would
    meet the same noise again in the next, which is no longer independent of what was kept.
    """
    fold = jax.vmap(lambda key, at: jax.random.fold_in(jax.random.fold_in(key, ROUND), at))
    return sampling.replace(key=fold(sampling.key, length))


def probabilities(
    logits: jax.Array, positions: jax.Array, sampling: SamplingState, vocab_size: int, history: History | None = None
) -> jax.Array:
    """Processed probabilities float32 [batch, vocab] of logits [batch, vocab]: what `choose_tokens` draws from.

    One-hot where the temperature is 0; zeros where the options leave no token.

    Args:
      positions: int32 [batch], absolute positions of the tokens to choose.
    """

    def soft(logits, row):
        return softmax(processed(logits, sampling, row))

    def hard(logits, _):
        return jax.nn.one_hot(best_token(logits)[0], logits.shape[0], dtype=jnp.float32)

    def one(row, column, logits, position):
        logits = adjusted(logits, sampling, history, row, column, position, vocab_size)
        return cond(sampling.temperature[row] > 0, soft, hard, logits, row)

    rows = jnp.arange(logits.shape[0])
    return over_rows(one, logits[:, None], rows, jnp.zeros_like(rows), positions)
