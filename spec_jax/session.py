"""Sessions: what a call leaves in its cache is where the next turn of its conversations begins."""

from __future__ import annotations

import collections
import dataclasses
import numbers
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_jax import cache as kv
from spec_jax.decode_state import DecodeState, Prefilled
from spec_jax.draft_length import CostModel
from spec_jax.drafting.registry import newest_params, without_history
from spec_jax.metrics import Completion, GenerateResult
from spec_jax.requests import Request, encode_prompts, is_conversation, make_requests, per_prompt

if TYPE_CHECKING:
    from spec_jax.generation import Call
    from spec_jax.slots import Slots

KEPT = 4
"""Sessions whose caches are kept, the newest: a program that collects its results must not collect their caches."""

_kept: collections.deque[weakref.ref[Session]] = collections.deque()


class Session:
    """Every sequence of one call, ready to be continued.

    The caches of the newest `KEPT` sessions stay on the device while the session is referred to; an older session, or
    one whose slots went to other prompts, prefills its text once more. The text is the same either way (E2), and
    `stats.num_cached_tokens` tells which it was.

    Attributes:
      token_ids: per sequence, prompt and new tokens.
    """

    def __init__(self, call: Call, slots: Slots, sequences: Sequence[Completion]):
        kept = without_history(call.config, call.drafter_params)
        self._call = dataclasses.replace(call, requests=[], active=[], drafter_params=kept)
        self._messages = [r.messages for r in call.requests]
        self._texts = [s.text for s in sequences]
        self.token_ids = [r.prompt + s.token_ids for r, s in zip(call.requests, sequences, strict=True)]
        self._slot_of = dict(slots.slot_of)
        self._state: DecodeState | None = None
        if not slots.refilled and slots.slot_of:
            self._state = slots.state
            _keep(self)

    @property
    def cached(self) -> bool:
        """Whether the next turn starts from the cache."""
        return self._state is not None

    def release(self) -> None:
        """Frees the cache. The session can still be continued."""
        self._state = None

    def generate(
        self, prompts: Any, sampling: Any = None, max_batch_size: int | None = None, progress: bool | None = None
    ) -> GenerateResult:
        """Continues every sequence with what follows it, with the drafter and the settings of the first call.

        Equal to `generate` on the whole text from the start, under E2 bit for bit.

        Args:
          prompts: what follows, one per sequence: text or token ids to append (or nothing), or further messages of a
            conversation, behind the reply that the sequence has given. A session of one sequence also takes its
            continuation without the list around it.
          sampling, max_batch_size, progress: as in `generate`.

        Returns:
          A `GenerateResult` with a session of its own; this one can be continued again, otherwise.
        """
        from spec_jax.generation import check_progress, prepare

        check_progress(progress)
        target = self._call.target
        prompts, messages = self._whole(prompts)
        ids = encode_prompts(target, prompts)
        requests = make_requests(target, ids, per_prompt(sampling, len(ids)), messages)
        old = self._call
        decoder = old.decoder
        auto = isinstance(decoder.policy, CostModel)
        call = prepare(
            target,
            requests,
            old.config,
            "auto" if auto else decoder.width,
            old.exact,
            max_batch_size if max_batch_size is not None else old.max_batch_size,
            (decoder.drafter, newest_params(old.config, target, old.drafter_params)),
        )
        if self._state is not None:
            call = dataclasses.replace(call, capacity=max(call.capacity, self._state.cache.capacity))
        return call.finish(progress, self._source(call.capacity))

    def _whole(self, prompts: Any) -> tuple[list[Any], list[tuple | None]]:
        """Every sequence's whole prompt, and its conversation so far."""
        if isinstance(prompts, np.ndarray):
            prompts = prompts.tolist()
        if not isinstance(prompts, (str, list, tuple)):
            raise ValueError(f"prompts must be a string, or a list with one continuation per sequence, not {prompts!r}")
        if isinstance(prompts, str) or (prompts and all(isinstance(m, (Mapping, numbers.Integral)) for m in prompts)):
            prompts = [prompts]  # one continuation
        if len(prompts) != len(self.token_ids):
            raise ValueError(f"the session has {len(self.token_ids)} sequences, but {len(prompts)} continuations were "
                             "given; give one per sequence, in order")  # fmt: skip
        whole, talks = [], []
        for number, more in enumerate(prompts):
            talk = self._messages[number]
            if is_conversation(more):
                if talk is None:
                    raise ValueError(f"sequence {number} began as text or token ids and cannot go on with messages; "
                                     "give text or token ids")  # fmt: skip
                talk = (*talk, {"role": "assistant", "content": self._texts[number]}, *(dict(m) for m in more))
                whole.append(list(talk))
            elif isinstance(more, str):
                tokenizer = self._call.target.tokenizer
                if tokenizer is None:
                    raise ValueError(f"continuation {number} is text, but {self._call.target.name} has no tokenizer; "
                                     "give token ids")  # fmt: skip
                whole.append(self.token_ids[number] + tokenizer.encode(more, add_special_tokens=False))
                talk = None
            else:
                empty = isinstance(more, (list, tuple)) and not more
                (ids,) = [[]] if empty else encode_prompts(self._call.target, [more])
                whole.append(self.token_ids[number] + ids)
                talk = None
            talks.append(talk)
        return whole, talks

    def _source(self, capacity: int):
        """Where the prefill of a continued sequence starts: its row of the kept state, as far as the text agrees."""
        drafter = self._call.decoder.drafter
        state = self._state
        if state is None:
            return None
        if capacity != state.cache.capacity:
            grown = drafter.grow(state.drafter, capacity)
            if grown is None and jax.tree.leaves(state.drafter):
                return None
            state = state.replace(cache=state.cache.grow(capacity), drafter=grown)

        def source(request: Request) -> tuple[Prefilled, int] | None:
            slot = self._slot_of.get(request.prompt_index)
            if slot is None:
                return None
            old = self.token_ids[request.prompt_index]
            same = next((i for i, (a, b) in enumerate(zip(old, request.prompt, strict=False)) if a != b), None)
            same = min(len(old), len(request.prompt)) if same is None else same
            # The newest token is not in the cache yet, and a drafter may lack the one before it as well.
            start = max(min(same, len(old) - 1, len(request.prompt) - 1) - 1, 0)
            slot = jnp.int32(slot)

            def take(x):
                return lax.dynamic_slice_in_dim(x, slot, 1)

            cache = kv.KVCache(
                k=tuple(map(take, state.cache.k)),
                v=tuple(map(take, state.cache.v)),
                length=jnp.full(1, start, jnp.int32),
            )
            return Prefilled(cache, drafter.take(state.drafter, slot)), start

        return source


def _keep(session: Session) -> None:
    alive = [reference for reference in _kept if reference() is not None]
    _kept.clear()
    _kept.extend([*alive, weakref.ref(session)])
    if len(_kept) > KEPT:
        _release(_kept.popleft())


def release_sessions() -> None:
    """Frees the caches of all sessions."""
    while _kept:
        _release(_kept.popleft())


def _release(reference: weakref.ref[Session]) -> None:
    session = reference()
    if session is not None:
        session.release()
