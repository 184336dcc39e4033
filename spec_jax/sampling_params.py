"""`SamplingParams`: how the tokens of one prompt are chosen and where they end, checked on creation.

Names, defaults and meanings follow vLLM. This module imports neither jax nor flax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from spec_jax.checks import is_int, is_number, nearest, plain
from spec_jax.text import INCOMPLETE

MAX_SEED = 2**64 - 1
MAX_TEMPERATURE = 1e30
"""Logits divided by a temperature beyond it, or below its inverse, overflow float32."""
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_REPETITION = 1e6


@dataclasses.dataclass(frozen=True, init=False)
class SamplingParams:
    """How the tokens of one prompt are chosen. Every option holds at every verified position, whatever the drafter.

    Attributes:
      n: samples per prompt; sample j > 0 uses a seed derived from (seed, j), reported in `seq.seed`.
      temperature: 0 is greedy (ties go to the lowest id); otherwise the logits are divided by it.
      top_k: keep the k most likely tokens; 0 or -1 keeps all. Ties at the cut are all kept.
      top_p: keep the smallest set of most likely tokens whose mass reaches top_p, in (0, 1]. Ties are all kept.
      min_p: keep tokens at least min_p times as likely as the likeliest, in [0, 1].
      seed: 0..2**64-1; None draws a fresh one, reported in `seq.seed`.
      max_tokens: at most this many new tokens; 0 returns none without running the model.
      min_tokens: no end-of-text id and no id of stop_token_ids among the first min_tokens tokens, and no stop string
        that is complete before the token after them.
      stop: a string or strings that end the text, which is cut in front of the one that begins first. `token_ids`
        ends with the token in which it became complete. Looked for in the new text only.
      stop_token_ids: further ids that end a row; the stop token is the last of `token_ids`, not part of `text`.
      ignore_eos: do not stop at the model's own end-of-text ids.
      logprobs: None, or 0..20: per token the natural-log softmax of the raw logits, before any option below, of the
        token itself and of this many most likely ones.
      repetition_penalty: > 0; logits of tokens in the prompt or the new text are divided by it where positive and
        multiplied where negative. 1 is none.
      presence_penalty: in [-2, 2], subtracted from the logits of tokens that are in the new text.
      frequency_penalty: in [-2, 2], subtracted once for every time that a token is in the new text.
      logit_bias: {token id: number in [-100, 100], or -inf to forbid the token}, added to the logits.
      bad_words: strings that may not be written: the last token of one, as the tokenizer writes it with and without a
        space in front, is forbidden where the new text ends with the tokens before it. White space that the string
        itself begins with is ignored, and other tokens may still spell the same letters.
      allowed_token_ids: only these ids may be written; None allows all.
      mask_fn: a pure function of JAX arrays, mask_fn(state, token) -> (state, mask): what the grammar of one row
        allows next, bool [vocab_size], after `token` (int32 scalar), -1 in front of the first new token. Draft tokens
        are tried on copies of the state, illegal ones among them. A function, which becomes part of the compiled
        program, or a registered pytree that can be called, whose arrays are arguments of it; see `spec_jax.grammar`.
      mask_state: the grammar's first state, a pytree of arrays. Default: int32 0.

    The order is: mask_fn, allowed_token_ids, logit_bias, min_tokens, bad_words, penalties, temperature, min_p, top_k,
    top_p. A row ends with "stop" where no token is left to choose.
    """

    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    # A grammar may hold arrays, which have no truth value to compare with.
    mask_fn: Callable[[Any, Any], tuple[Any, Any]] | None = dataclasses.field(default=None, compare=False)
    mask_state: Any = dataclasses.field(default=None, compare=False)

    def __init__(self, **fields):
        known = [f.name for f in dataclasses.fields(type(self))]
        for name in fields:
            if name not in known:
                raise ValueError(f"unknown sampling option {name!r}{nearest(name, known)}; known: {', '.join(known)}")
        for field in dataclasses.fields(type(self)):
            object.__setattr__(self, field.name, plain(fields.get(field.name, field.default)))
        self._normalise()
        self._check()

    def _normalise(self):
        """Lists become tuples; anything of another type is left for the check to name."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            if isinstance(getattr(self, name), (list, tuple, set, frozenset, range)):
                object.__setattr__(self, name, tuple(map(plain, getattr(self, name))))
        if isinstance(self.logit_bias, Mapping):
            bias = {plain(token): plain(value) for token, value in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", bias)

    def _check(self):
        def check(ok, name, allowed):
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; it must be {allowed}")

        def within(name, low, high):
            value = getattr(self, name)
            check(is_number(value) and low <= value <= high, name, f"a number in [{low:g}, {high:g}]")

        def ids(value):
            return isinstance(value, tuple) and all(is_int(i) and i >= 0 for i in value)

        def words(value):
            return isinstance(value, tuple) and all(isinstance(w, str) and w and _is_unicode(w) for w in value)

        check(is_int(self.n) and self.n >= 1, "n", "an integer of at least 1")
        t = self.temperature
        allowed = f"0 (greedy) or between {1 / MAX_TEMPERATURE:g} and {MAX_TEMPERATURE:g}"
        check(is_number(t) and (t == 0 or 1 / MAX_TEMPERATURE <= t <= MAX_TEMPERATURE), "temperature", allowed)
        check(is_int(self.top_k) and self.top_k >= -1, "top_k", "an integer: 0 or -1 for all, else at least 1")
        check(is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1]; 1 keeps all")
        check(is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "in [0, 1]; 0 keeps all")
        check(self.seed is None or (is_int(self.seed) and 0 <= self.seed <= MAX_SEED), "seed", "None or 0..2**64-1")
        check(is_int(self.max_tokens) and self.max_tokens >= 0, "max_tokens", "an integer of at least 0")
        allowed = f"an integer of at least 0 and at most max_tokens={self.max_tokens}"
        check(is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens, "min_tokens", allowed)
        allowed = "a string or a list of strings of valid Unicode, none empty or with U+FFFD, which stands for no text"
        check(words(self.stop) and not any(INCOMPLETE in s for s in self.stop), "stop", allowed)
        check(ids(self.stop_token_ids), "stop_token_ids", "a list of token ids (integers of at least 0)")
        check(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        top = self.logprobs
        allowed = f"None, or an integer in 0..{MAX_LOGPROBS}"
        check(top is None or (is_int(top) and 0 <= top <= MAX_LOGPROBS), "logprobs", allowed)
        r = self.repetition_penalty
        allowed = f"a number in [{1 / MAX_REPETITION:g}, {MAX_REPETITION:g}]; 1 is none"
        check(is_number(r) and 1 / MAX_REPETITION <= r <= MAX_REPETITION, "repetition_penalty", allowed)
        within("presence_penalty", -2, 2)
        within("frequency_penalty", -2, 2)
        bias = self.logit_bias
        ok = bias is None or (isinstance(bias, dict) and ids(tuple(bias)) and all(map(_is_bias, bias.values())))
        allowed = f"a dict of token id: number in [-{MAX_BIAS:g}, {MAX_BIAS:g}], or -inf to forbid the token"
        check(ok, "logit_bias", allowed)
        check(words(self.bad_words), "bad_words", "a list of strings of valid Unicode, none empty")
        allowed = "None, or a list of at least one token id (integers of at least 0)"
        check(self.allowed_token_ids is None or (ids(self.allowed_token_ids) and self.allowed_token_ids),
              "allowed_token_ids", allowed)  # fmt: skip
        check(self.mask_fn is None or callable(self.mask_fn), "mask_fn", "None or a function of (state, token)")
        if self.mask_state is not None and self.mask_fn is None:
            raise ValueError(f"mask_state={self.mask_state!r} was given without a mask_fn")


def _is_unicode(text: str) -> bool:
    """Whether the text can be encoded: a lone surrogate, as `json.loads` can make, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_bias(value: Any) -> bool:
    return is_number(value) and (value == float("-inf") or abs(value) <= MAX_BIAS)
