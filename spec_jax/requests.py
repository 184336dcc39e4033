"""From what a caller passes to what the decode loop takes: prompts, their options, and the options as arrays."""

from __future__ import annotations

import dataclasses
import inspect
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.cache import power_of_two
from spec_jax.processors import NOTHING, Penalties, Processors
from spec_jax.sampling import SamplingState
from spec_jax.sampling_params import SamplingParams

MAX_INT = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Request:
    """One row to decode: sample `sample` of prompt `prompt_index`.

    Attributes:
      index: its place among the results.
      prompt: token ids.
      messages: the conversation that the prompt was made from, or None.
      params: as the caller gave them.
      seed: the row's own.
      stop_ids: every id that ends it.
      bad_words: `params.bad_words` as token ids, each with and without a space in front.
    """

    index: int
    prompt_index: int
    prompt: list[int]
    messages: tuple | None
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...] = ()


def encode_prompts(target: Any, prompts: Any) -> list[list[int]]:
    """Token ids of prompts in any accepted form, checked against the vocabulary and the model's context."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be a string, a list of strings, of token-id lists or of conversations, "
                         f"not {type(prompts).__name__}")  # fmt: skip
    if prompts and all(isinstance(p, (int, np.integer)) or isinstance(p, Mapping) for p in prompts):
        raise ValueError("prompts is a single list of token ids or messages; wrap it in a list: [prompt]")
    ids = [_encode_prompt(target, index, prompt) for index, prompt in enumerate(prompts)]
    for index, prompt in enumerate(ids):
        if not prompt:
            raise ValueError(f"prompt {index} is empty; a prompt needs at least one token")
        wrong = next((t for t in prompt if not 0 <= t < target.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"prompt {index} holds the token id {wrong}; ids must lie in 0..{target.vocab_size - 1}")
        if len(prompt) > target.max_model_len:
            raise ValueError(f"prompt {index} has {len(prompt)} tokens, more than the model's context of "
                             f"{target.max_model_len}; shorten it or raise max_model_len")  # fmt: skip
    return ids


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(m, Mapping) for m in prompt)


def _encode_prompt(target: Any, index: int, prompt: Any) -> list[int]:
    if isinstance(prompt, np.ndarray) and prompt.ndim == 1 and np.issubdtype(prompt.dtype, np.integer):
        prompt = prompt.tolist()
    is_text = isinstance(prompt, str)
    if is_text or is_conversation(prompt):
        if target.tokenizer is None:
            raise ValueError(f"prompt {index} is text, but {target.name} has no tokenizer; give token ids")
        try:
            return target.tokenizer.encode(prompt) if is_text else target.tokenizer.apply_chat_template(list(prompt))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
    if isinstance(prompt, (list, tuple)) and all(
        isinstance(t, (int, np.integer)) and not isinstance(t, bool) for t in prompt
    ):
        return [int(t) for t in prompt]
    raise ValueError(f"prompt {index} must be a string, a list of token ids or a list of messages, not {prompt!r}")


def messages_of(prompts: Any) -> list[tuple | None]:
    """The conversations among the prompts, None for every other prompt."""
    if isinstance(prompts, str):
        return [None]
    return [tuple(map(dict, p)) if is_conversation(p) else None for p in prompts]


def per_prompt(sampling: Any, count: int) -> list[SamplingParams]:
    def one(value):
        if value is None:
            return SamplingParams()
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return SamplingParams(**value)
        if not isinstance(value, SamplingParams):
            raise ValueError(f"sampling must be SamplingParams or a dict of its options, not {value!r}")
        return value

    if isinstance(sampling, (list, tuple)):
        if len(sampling) != count:
            raise ValueError(
                f"{len(sampling)} sampling parameters were given for {count} prompts; give one, or as many"
            )
        return [one(value) for value in sampling]
    return [one(sampling)] * count


def make_requests(
    target: Any, prompts: list[list[int]], params: list[SamplingParams], messages: Sequence[tuple | None] = ()
) -> list[Request]:
    """One request per sample, prompt-major, with every option that needs the model checked against it."""
    requests = []
    checked: dict[int, tuple] = {}  # one object often stands for every prompt
    for number, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        stop_ids = tuple(sorted({*(() if p.ignore_eos else target.eos_token_ids), *p.stop_token_ids}))
        if id(p) not in checked:
            checked[id(p)] = _check_options(target, p, stop_ids)
        talk = messages[number] if messages else None
        for sample in range(p.n):
            seed = secrets.randbits(32) if p.seed is None else sample_seed(p.seed, sample)
            requests.append(Request(len(requests), number, prompt, talk, p, seed, stop_ids, checked[id(p)]))
    return requests


def _check_options(target: Any, p: SamplingParams, stop_ids: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Checks the options that need the model, and returns the bad words as token ids."""
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        wrong = next((t for t in getattr(p, name) or () if t >= target.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"{name} holds {wrong}; ids must lie in 0..{target.vocab_size - 1}")
    if p.logprobs is not None and p.logprobs > target.vocab_size:
        raise ValueError(f"logprobs={p.logprobs} is more than the vocabulary of {target.vocab_size}")
    for name in ("stop", "bad_words"):
        if getattr(p, name) and target.tokenizer is None:
            raise ValueError(f"{name}={getattr(p, name)!r} is text, but {target.name} has no tokenizer; give token ids "
                             "(stop_token_ids, or logit_bias with -inf)")  # fmt: skip
    for string in p.stop:
        special = set(target.tokenizer.encode(string, add_special_tokens=False)) & set(_special_ids(target.tokenizer))
        if special:
            raise ValueError(f"stop={string!r} holds special tokens, which no text shows; use "
                             f"stop_token_ids={sorted(special)}")  # fmt: skip
    if p.allowed_token_ids is not None or p.logit_bias:
        left = set(np.flatnonzero(_bias_row(p, target.vocab_size) > -np.inf).tolist())
        if not left:
            raise ValueError("allowed_token_ids and logit_bias together leave no token to choose")
        if p.min_tokens and left <= set(stop_ids):
            raise ValueError(f"min_tokens={p.min_tokens} forbids the stop ids at first, and allowed_token_ids and "
                             f"logit_bias leave only these: {sorted(left)}")  # fmt: skip
    if p.mask_fn is not None:
        _check_grammar(p, target.vocab_size)
    return tuple(dict.fromkeys(ids for word in p.bad_words for ids in _spellings(target.tokenizer, word)))


def _special_ids(tokenizer: Any) -> frozenset[int]:
    return getattr(tokenizer, "special_ids", frozenset())  # a tokenizer of one's own need not have any


def _spellings(tokenizer: Any, word: str) -> list[tuple[int, ...]]:
    """The token ids of a bad word at the start of a text and behind a space, as far as they differ."""
    bare = word.lstrip() or word
    found = [tuple(tokenizer.encode(bare, add_special_tokens=False))]
    spaced = tuple(tokenizer.encode(" " + bare, add_special_tokens=False))
    # A tokenizer that writes the space as a token of its own only repeats the bare word behind it.
    if spaced[-len(found[0]) :] != found[0]:
        found.append(spaced)
    if not all(found):
        raise ValueError(f"bad_words holds {word!r}, which the tokenizer writes as no token")
    return found


def _grammar(fn: Any) -> Any:
    """A grammar as a pytree that can be called.

    Functions are told apart by identity, as jax.jit does; other objects must be pytrees, whose arrays are arguments.
    What else an object holds would be frozen into the program, and a later change of it ignored.
    """
    if jax.tree.structure(fn) == jax.tree.structure(0):
        if not inspect.isfunction(inspect.unwrap(fn)):
            raise ValueError(f"mask_fn={fn!r} must be a function or a registered pytree that can be called (such as a "
                             "flax.struct.dataclass); bound methods and other objects may change unseen")  # fmt: skip
        fn = jax.tree_util.Partial(fn)
    return fn


def _first_state(p: SamplingParams) -> Any:
    """The grammar's first state as arrays."""
    state = 0 if p.mask_state is None else p.mask_state
    try:
        return jax.tree.map(jnp.asarray, state)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"mask_state={p.mask_state!r} must be a pytree of arrays: {error}") from None


def _check_grammar(p: SamplingParams, vocab_size: int) -> None:
    fn, state = _grammar(p.mask_fn), _first_state(p)
    try:
        result = jax.eval_shape(fn, state, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:  # whatever the caller's function raises
        first = str(error).strip().partition("\n")[0]
        kind = type(error).__name__
        raise ValueError(f"mask_fn cannot be traced as mask_fn(state, token): {kind}: {first}") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"mask_fn must return (state, mask), not {result!r}")
    after, mask = result

    def shapes(tree):
        return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)

    if shapes(after) != shapes(state):
        raise ValueError(f"mask_fn must return a state like the one it is given: mask_state is {shapes(state)}, the "
                         f"returned state {shapes(after)} (shape, dtype)")  # fmt: skip
    if getattr(mask, "shape", None) != (vocab_size,) or mask.dtype != bool:
        raise ValueError(f"mask_fn must return a mask bool[{vocab_size}], one per id of the vocabulary, not {mask}")


def sample_seed(seed: int, sample: int) -> int:
    """The seed of sample `sample` of a prompt: `seed` itself for the first, else mixed from both numbers."""
    if sample == 0:
        return seed
    low, high = np.random.SeedSequence([seed & 0xFFFFFFFF, seed >> 32, sample]).generate_state(2)
    return int(high) << 32 | int(low)


def seed_key(seed: int) -> np.ndarray:
    """Key data uint32 [2] of a seed of up to 64 bits."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which options the requests of one call use, and how large: what decides the shapes of the compiled program.

    Sizes are rounded up to powers of two, so that one more stop id or word does not compile anew.

    Attributes:
      stops, words, longest: stop ids per row; bad words per row and their longest.
      bias, minimum, penalties: whether any row uses them.
      grammars: the grammars, each with its first state, told apart by identity.
      logprobs: how many likely ids are recorded, None for no log-probabilities.
    """

    stops: int
    words: int = 0
    longest: int = 0
    bias: bool = False
    minimum: bool = False
    penalties: bool = False
    grammars: tuple[tuple[Any, Any], ...] = ()
    logprobs: int | None = None


def layout_of(requests: Sequence[Request], vocab_size: int) -> Layout:
    """The layout that holds all requests of one call."""
    params = list({id(r.params): r.params for r in requests}.values())
    words = max((len(r.bad_words) for r in requests), default=0)
    longest = max((len(w) for r in requests for w in r.bad_words), default=0)
    grammars: list[tuple[Any, Any]] = []
    for p in params:
        if p.mask_fn is not None and _grammar_index(grammars, p) is None:
            grammars.append((p.mask_fn, _first_state(p)))
    asked = [p.logprobs for p in params if p.logprobs is not None]
    logprobs = min(power_of_two(max(asked)), vocab_size) if asked and max(asked) else 0 if asked else None
    return Layout(
        stops=max(8, power_of_two(max((len(r.stop_ids) for r in requests), default=1))),
        words=power_of_two(words),
        longest=power_of_two(longest),
        bias=any(p.logit_bias or p.allowed_token_ids for p in params),
        minimum=any(p.min_tokens for p in params),
        penalties=any(
            (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0) for p in params
        ),
        grammars=tuple(grammars),
        logprobs=logprobs,
    )


def _grammar_index(grammars: Sequence[tuple[Any, Any]], p: SamplingParams) -> int | None:
    """Which entry holds this request's grammar: the same object and a first state of the same shapes."""
    state = _first_state(p)

    def kind(tree):
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]

    for number, (known, first) in enumerate(grammars):
        if known is p.mask_fn and kind(first) == kind(state):
            return number
    return None


def _bias_row(p: SamplingParams, size: int) -> np.ndarray:
    row = np.zeros(size, np.float32)
    if p.allowed_token_ids is not None:
        row[:] = -np.inf
        row[list(p.allowed_token_ids)] = 0.0
    for token, value in (p.logit_bias or {}).items():
        row[token] += value
    return row


def row_arrays(
    layout: Layout, rows: Mapping[int, Request], batch: int, vocab: int, shared: bool = False
) -> tuple[SamplingState, tuple[Any, ...]]:
    """The parameters of some rows of a batch as arrays, and the first states of their grammars.

    Args:
      rows: requests by their row; the others are greedy fillers that never run.
      vocab: rows of the target's head.
      shared: all rows share their parameters: their bias, the one large array, is [1, vocab], and the grammars are
        left out.
    """

    def column(read, filler, dtype):
        return jnp.asarray(np.array([read(rows[i]) if i in rows else filler for i in range(batch)], dtype))

    stop_ids = np.full((batch, layout.stops), -1, np.int32)
    for row, request in rows.items():
        stop_ids[row, : len(request.stop_ids)] = request.stop_ids
    keys = np.stack([seed_key(rows[i].seed if i in rows else 0) for i in range(batch)])
    penalties = bias = bad_words = minimum = grammar = None
    if layout.penalties:
        names = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
        penalties = Penalties(**{
            name: column(lambda r, name=name: getattr(r.params, f"{name}_penalty"), none, np.float32)
            for name, none in names.items()
        })  # fmt: skip
    if layout.bias:
        of_row = {0: next(iter(rows.values()))} if shared else rows
        dense = np.zeros((1 if shared else batch, vocab), np.float32)
        for row, request in of_row.items():
            dense[row] = _bias_row(request.params, vocab)
        bias = jnp.asarray(dense)
    if layout.words:
        padded = np.full((batch, layout.words, layout.longest), NOTHING, np.int32)
        for row, request in rows.items():
            for number, word in enumerate(request.bad_words):
                padded[row, number, layout.longest - len(word) :] = word
        bad_words = jnp.asarray(padded)
    if layout.minimum:
        minimum = column(lambda r: min(len(r.prompt) + r.params.min_tokens, MAX_INT), 0, np.int32)
    states = []
    if layout.grammars:
        places = {row: _grammar_index(layout.grammars, r.params) for row, r in rows.items() if r.params.mask_fn}
        grammar = jnp.asarray([places.get(i, -1) for i in range(batch)], jnp.int32)
        for number, (_, first) in enumerate(layout.grammars):
            own = [_first_state(rows[i].params) if places.get(i) == number else first for i in range(batch)]
            states.append(jax.tree.map(lambda *xs: jnp.stack(xs), *own))
    processors = None
    if layout.penalties or layout.bias or layout.words or layout.minimum or layout.grammars:
        fns = () if shared else tuple(_grammar(fn) for fn, _ in layout.grammars)
        processors = Processors(bias, minimum, bad_words, penalties, fns, grammar)
    sampling = SamplingState(
        temperature=column(lambda r: r.params.temperature, 0.0, np.float32),
        top_k=column(lambda r: min(max(r.params.top_k, 0), MAX_INT), 0, np.int32),
        top_p=column(lambda r: r.params.top_p, 1.0, np.float32),
        min_p=column(lambda r: r.params.min_p, 0.0, np.float32),
        key=jax.random.wrap_key_data(jnp.asarray(keys), impl="threefry2x32"),
        stop_ids=jnp.asarray(stop_ids),
        processors=processors,
    )
    return sampling, tuple(states)


def sampling_state(requests: Sequence[Request], batch: int, vocab: int = 0) -> SamplingState:
    """The parameters of a batch whose first rows are these requests; what `make_decoder`'s `init` takes.

    Args:
      vocab: rows of the target's head, needed where a request has a logit_bias or allowed_token_ids.

    Raises:
      ValueError: for the options that need more than parameters: mask_fn, logprobs and stop.
    """
    for request in requests:
        for name in ("mask_fn", "logprobs", "stop"):
            if getattr(request.params, name) not in (None, ()):
                raise ValueError(f"{name}={getattr(request.params, name)!r} needs `generate`; `make_decoder` runs the "
                                 "loop alone")  # fmt: skip
    return row_arrays(layout_of(requests, vocab), dict(enumerate(requests)), batch, vocab)[0]
