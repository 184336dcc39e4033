"""Decoding as it is defined, one token at a time: plain Python and NumPy, float64, no cache, no drafter, no batch.

Every option is written down once more from its description, sharing no code with the library; only the noise is the
library's by definition: Gumbel noise keyed by (seed, absolute position).
"""

import math

import jax
import numpy as np
import tiny

CLOSE = 2e-4


def options_of(params, model, prompt):
    """The ids and token sequences behind `params` for one model and prompt."""
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.eos_token_ids))
    words = []
    for word in params.bad_words:
        bare, spaced = (model.tokenizer.encode(lead + word.lstrip()) for lead in ("", " "))
        words += [bare] if spaced[-len(bare) :] == bare else [bare, spaced]
    return stop_ids, words


def adjusted(x, params, model, prompt, new, stop_ids, words, mask):
    """Logits [vocab] of the next token after everything that holds for greedy rows too."""
    x = np.array(x, np.float64)
    if mask is not None:
        x[~mask] = -np.inf
    if params.allowed_token_ids is not None:
        x[[i for i in range(len(x)) if i not in params.allowed_token_ids]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(new) < params.min_tokens:
        x[list(stop_ids)] = -np.inf
    for word in words:
        if new[len(new) - len(word) + 1 :] == word[:-1] and len(new) >= len(word) - 1:
            x[word[-1]] = -np.inf
    for token in set(prompt) | set(new):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(new):
        x[token] -= params.presence_penalty + params.frequency_penalty * new.count(token)
    return x


def filtered(x, params):
    """Logits after temperature and filters, and how close the nearest token is to the edge of a filter."""
    x, close = x / params.temperature, math.inf
    kept = np.isfinite(x)
    if params.min_p:
        edge = x.max() + math.log(params.min_p)
        close = min(close, np.abs(x[kept] - edge).min())
        x = np.where(x >= edge, x, -np.inf)
    order = np.argsort(-x, kind="stable")
    count = int(np.isfinite(x).sum())
    if 0 < params.top_k < count:
        close = min(close, x[order[params.top_k - 1]] - x[order[params.top_k]])
        x = np.where(x >= x[order[params.top_k - 1]], x, -np.inf)
        count = params.top_k
    if params.top_p < 1:
        mass = np.exp(x - x.max())
        total = np.cumsum(mass[order]) / mass.sum()
        close = min(close, np.abs(total[:count] - params.top_p).min())
        x = np.where(x >= x[order[int(np.searchsorted(total, params.top_p))]], x, -np.inf)
    return x, close


@jax.jit
def noise(seed_high, seed_low, position, like):
    key = jax.random.wrap_key_data(jax.numpy.array([seed_high, seed_low], "uint32"), impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, position), 1), like.shape)


def decode(model, prompt, params):
    """(ids, text, reason, logprob rows, closeness): `closeness` is the least lead of any choice made, in logits."""
    stop_ids, words = options_of(params, model, prompt)
    new, rows, closeness, reason = [], [], math.inf, None
    text_of = model.tokenizer.decode if model.tokenizer else lambda ids: None
    state = 0 if params.mask_state is None else params.mask_state
    seed = params.seed or 0
    while reason is None:
        if len(new) == params.max_tokens or len(prompt) + len(new) == model.max_model_len:
            reason = "length" if len(new) == params.max_tokens else "context"
            break
        mask = None
        if params.mask_fn is not None:
            state, mask = params.mask_fn(np.int32(state), np.int32(new[-1] if new else -1))
        raw = tiny.numpy_logits(model, prompt + new)[-1, : model.vocab_size]
        x = adjusted(raw, params, model, prompt, new, stop_ids, words, None if mask is None else np.asarray(mask))
        if np.isinf(x).all():
            reason = "stop"
            break
        if params.temperature > 0:
            x, close = filtered(x, params)
            high, low, at = np.uint32(seed >> 32), np.uint32(seed & 0xFFFFFFFF), np.int32(len(prompt) + len(new))
            draw = noise(high, low, at, np.zeros(model.config.vocab_size, "f"))
            x = x + np.asarray(draw, np.float64)[: len(x)]
            closeness = min(closeness, close)
        token = int(x.argmax())
        rest = np.delete(x, token).max()
        closeness = min(closeness, x[token] - rest)
        new.append(token)
        rows.append(raw - raw.max() - math.log(np.exp(raw - raw.max()).sum()))
        if token in stop_ids:
            return new, text_of(new[:-1]), "stop", rows, closeness
        if len(new) > params.min_tokens:
            text, early = text_of(new), text_of(new[: params.min_tokens])
            # A string that the first min_tokens tokens spell already has come too early to stop.
            begins = [i for s in params.stop for i in range(len(text)) if text.startswith(s, i)
                      and not early.startswith(text[: i + len(s)])]  # fmt: skip
            if begins:
                return new, text[: min(begins)], "stop", rows, closeness
    return new, text_of(new), reason, rows, closeness
