"""`generate` and `make_decoder`: prompts and options on the host, everything else in the compiled loop of `decode`."""

from __future__ import annotations

import dataclasses
import numbers
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import cache as kv
from spec_jax.compilation import compiled
from spec_jax.config import RULES, SamplingParams, SpeculativeConfig, choose_width, parse_speculative_config
from spec_jax.decode import CONTEXT, LENGTH, STOP, Decoder
from spec_jax.drafting.base import NoDrafter
from spec_jax.drafting.registry import build_drafter
from spec_jax.exactness import level_of, row_blocks
from spec_jax.metrics import Completion, GenerateResult, Stats, total
from spec_jax.sampling import SamplingState

REASONS = {STOP: "stop", LENGTH: "length", CONTEXT: "context"}
MAX_BATCH = 64
MIN_BLOCKS = 4
MAX_CHUNK = 64
ASSUMED_FREE = 4 << 30
MAX_INT = np.iinfo(np.int32).max


def generate(
    target: Any,
    prompts: Any,
    speculative_config: Any = None,
    sampling: SamplingParams | Sequence[SamplingParams] | Mapping | None = None,
    verify_width: int | None = None,
    exact: bool | None = None,
    max_batch_size: int | None = None,
    drafter: tuple[Any, Any] | None = None,
) -> GenerateResult:
    """Generates continuations, exactly as the target alone would.

    Args:
      target: a loaded `Model`.
      prompts: a string, a list of strings, a list of token-id lists, or a list of conversations (lists of
        {"role", "content"} messages, rendered with the model's chat template).
      speculative_config: None, a dict, a JSON object as text, or a `SpeculativeConfig`.
      sampling: one `SamplingParams` (or dict) for all prompts, or a list with one per prompt; None is greedy.
      verify_width: rows of one verification step; None takes the config's, else the default (8 up to K = 7).
      exact: True: logits independent of drafter, K, width, batch and bucket (E2), whatever it costs. None: E2 while
        batch x width fits one row block, else E1 (plain and speculative runs of the same width and batch are
        bit-identical). False: the narrowest width, no promise beyond E0.
      max_batch_size: rows decoded side by side; None takes what memory allows, at most 64.
      drafter: (drafter, its params) for a drafter of one's own, instead of `speculative_config`'s method; the
        config may still give verify_width and rejection_sample_method.

    Returns:
      A `GenerateResult`, sequences in the order of the prompts, n per prompt.

    Raises:
      ValueError: for bad input, naming the value and what is allowed.
    """
    config = _check_config(speculative_config, drafter)
    ids = encode_prompts(target, prompts)
    requests = _requests(target, ids, _per_prompt(sampling, len(ids)))
    active = [r for r in requests if r.params.max_tokens > 0 and len(r.prompt) < target.max_model_len]
    width_asked = verify_width if verify_width is not None else config.verify_width
    batch = _batch_size(target, active, max_batch_size)

    num_nodes = drafter[0].num_nodes if drafter else config.num_speculative_tokens
    width = num_nodes + 1 if exact is False and width_asked is None else choose_width(num_nodes, width_asked)
    rows = row_blocks(exact, batch, width, target.module)
    built = drafter if drafter else build_drafter(config, target, rows)
    decoder = _decoder(target, built[0], width, config.rule, rows)

    results: dict[int, Completion] = {}
    times = np.zeros(3)
    for first in range(0, len(active), batch):
        group = active[first : first + batch]
        state, seconds = _decode_batch(target, decoder, built[1], group, batch)
        times += seconds
        for row, request in enumerate(group):
            results[request.index] = _completion(target, request, state, row)
    for request in requests:
        if request.index not in results:
            results[request.index] = _untouched(target, request, decoder)
    sequences = [results[r.index] for r in requests]
    compile_seconds, prefill_seconds, decode_seconds = map(float, times)
    stats = total([s.stats for s in sequences] + [Stats(
        compile_seconds=compile_seconds, prefill_seconds=prefill_seconds, decode_seconds=decode_seconds
    )])  # fmt: skip
    level = level_of(rows, exact, tree=built[0].parents is not None or built[0].dynamic_tree)
    return GenerateResult(sequences=sequences, exactness=level, verify_width=width, stats=stats)


def make_decoder(
    target: Any,
    drafter: Any = None,
    *,
    batch: int = 1,
    verify_width: int | None = None,
    rejection_sample_method: str = "coupled",
    exact: bool | None = None,
    prefill_chunk: int | None = None,
):
    """The pure functions underneath `generate`, to jit, export, shard or embed.

    Args:
      target: a loaded `Model`; only its static parts are used.
      drafter: a drafter; None decodes plainly.
      batch: rows, which decides between E2 and E1 when `exact` is None.

    Returns:
      init(params, drafter_params, tokens, prompt_length, limit, cap_reason, sampling) -> DecodeState and
      run(params, drafter_params, state, max_steps) -> DecodeState; see `decode.Decoder`.
    """
    drafter = NoDrafter() if drafter is None else drafter
    width = choose_width(drafter.num_nodes, verify_width)
    if rejection_sample_method not in RULES:
        allowed = ", ".join(RULES)
        raise ValueError(f"rejection_sample_method={rejection_sample_method!r} is not known; allowed: {allowed}")
    if prefill_chunk is not None and (not isinstance(prefill_chunk, int) or prefill_chunk < 1):
        raise ValueError(f"prefill_chunk={prefill_chunk!r} must be a positive integer, or None for the default")
    rows = row_blocks(exact, batch, width, target.module)
    decoder = _decoder(target, drafter, width, rejection_sample_method, rows, prefill_chunk)
    return decoder.init, decoder.run


@dataclasses.dataclass(frozen=True)
class _Request:
    """One row to decode: sample `sample` of prompt `prompt_index`."""

    index: int
    prompt_index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]


def _check_config(value: Any, drafter: Any) -> SpeculativeConfig:
    if drafter is None:
        return parse_speculative_config(value)
    if not (isinstance(drafter, tuple) and len(drafter) == 2 and hasattr(drafter[0], "propose")):
        raise ValueError(f"drafter must be a pair (drafter, its parameters), not {drafter!r}")
    if isinstance(drafter[0], type):
        raise ValueError(f"drafter must hold an instance, not the class {drafter[0].__name__}; call it")
    try:
        hash(drafter[0])
    except TypeError:
        name = type(drafter[0]).__name__
        raise ValueError(f"drafter {name} is not hashable; make it a frozen dataclass without arrays") from None
    if isinstance(value, Mapping) and "method" not in value:
        value = {"method": "none", **value}
    config = parse_speculative_config(value)
    if config.method != "none":
        raise ValueError(f"give either a drafter or a method, not both: method={config.method!r} came with drafter="
                         f"{drafter[0]!r}")  # fmt: skip
    return config


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


def _encode_prompt(target: Any, index: int, prompt: Any) -> list[int]:
    if isinstance(prompt, np.ndarray) and prompt.ndim == 1 and np.issubdtype(prompt.dtype, np.integer):
        prompt = prompt.tolist()
    is_text = isinstance(prompt, str)
    is_chat = isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(m, Mapping) for m in prompt)
    if is_text or is_chat:
        if target.tokenizer is None:
            raise ValueError(f"prompt {index} is text, but {target.name} has no tokenizer; give token ids")
        return target.tokenizer.encode(prompt) if is_text else target.tokenizer.apply_chat_template(list(prompt))
    if isinstance(prompt, (list, tuple)) and all(
        isinstance(t, (int, np.integer)) and not isinstance(t, bool) for t in prompt
    ):
        return [int(t) for t in prompt]
    raise ValueError(f"prompt {index} must be a string, a list of token ids or a list of messages, not {prompt!r}")


def _per_prompt(sampling: Any, count: int) -> list[SamplingParams]:
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


def _requests(target: Any, ids: list[list[int]], params: list[SamplingParams]) -> list[_Request]:
    requests = []
    for prompt_index, (prompt, p) in enumerate(zip(ids, params, strict=True)):
        wrong = next((t for t in p.stop_token_ids if t >= target.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"stop_token_ids holds {wrong}; ids must lie in 0..{target.vocab_size - 1}")
        stop_ids = tuple(sorted({*(() if p.ignore_eos else target.eos_token_ids), *p.stop_token_ids}))
        for sample in range(p.n):
            seed = secrets.randbits(32) if p.seed is None else sample_seed(p.seed, sample)
            requests.append(_Request(len(requests), prompt_index, prompt, p, seed, stop_ids))
    return requests


def sample_seed(seed: int, sample: int) -> int:
    """The seed of sample `sample` of a prompt: `seed` itself for the first, else mixed from both numbers."""
    if sample == 0:
        return seed
    low, high = np.random.SeedSequence([seed & 0xFFFFFFFF, seed >> 32, sample]).generate_state(2)
    return int(high) << 32 | int(low)


def seed_key(seed: int) -> np.ndarray:
    """Key data uint32 [2] of a seed of up to 64 bits."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def _batch_size(target: Any, active: list[_Request], asked: int | None) -> int:
    if asked is not None:
        if not isinstance(asked, numbers.Integral) or isinstance(asked, bool) or asked < 1:
            raise ValueError(f"max_batch_size={asked!r} must be a positive integer, or None to let memory decide")
        return max(min(int(asked), len(active)), 1)
    c = target.config
    longest = max((min(len(r.prompt) + r.params.max_tokens, target.max_model_len) for r in active), default=1)
    slot_bytes = 2 * c.num_layers * c.num_kv_heads * c.head_dim * jnp.dtype(target.module.dtype).itemsize
    fits = int(_free_bytes() // 2 // (slot_bytes * capacity_for(longest, 8)))
    return max(min(fits, len(active), MAX_BATCH), 1)


def _free_bytes() -> int:
    """Memory that is free on the default device, or on the host where the device does not tell."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system tells how much is free
        return ASSUMED_FREE


def _decoder(target, drafter, width, rule, rows, prefill_chunk=None) -> Decoder:
    chunk = prefill_chunk or min(rows.block or MAX_CHUNK, MAX_CHUNK)
    return Decoder(target.module, drafter, target.vocab_size, width, rule, rows, chunk)


def capacity_for(longest: int, width: int) -> int:
    """Slots for rows of up to `longest` tokens and a flight of `width` rows.

    A power of two of KV blocks, at least four, so that prompts of many lengths share one program. Attention reads no
    block beyond the longest row.
    """
    blocks = max(-(-(longest + width) // kv.BLOCK), MIN_BLOCKS)
    return kv.BLOCK * (1 << (blocks - 1).bit_length())


def sampling_state(requests: Sequence[_Request], batch: int) -> SamplingState:
    """The rows' parameters as arrays; rows beyond the requests are greedy fillers that never run."""
    params = [r.params for r in requests]
    fill = batch - len(requests)
    stops = max((len(r.stop_ids) for r in requests), default=0)
    stops = max(8, 1 << max(stops - 1, 0).bit_length())  # few shapes, so that one more stop id does not recompile
    stop_ids = np.full((batch, stops), -1, np.int32)
    for row, request in enumerate(requests):
        stop_ids[row, : len(request.stop_ids)] = request.stop_ids
    keys = np.stack([seed_key(r.seed) for r in requests] + [seed_key(0)] * fill)
    return SamplingState(
        temperature=jnp.asarray([p.temperature for p in params] + [0.0] * fill, jnp.float32),
        top_k=jnp.asarray([min(max(p.top_k, 0), MAX_INT) for p in params] + [0] * fill, jnp.int32),
        top_p=jnp.asarray([p.top_p for p in params] + [1.0] * fill, jnp.float32),
        min_p=jnp.asarray([p.min_p for p in params] + [0.0] * fill, jnp.float32),
        key=jax.random.wrap_key_data(jnp.asarray(keys), impl="threefry2x32"),
        stop_ids=jnp.asarray(stop_ids),
    )


def _decode_batch(target, decoder, drafter_params, group, batch):
    """Prefills and decodes one batch; returns the final state on the host and (compile, prefill, decode) seconds."""
    fill = batch - len(group)
    lengths = np.array([len(r.prompt) for r in group] + [1] * fill, np.int32)
    # In Python integers: a budget may be larger than an int32, the model's context is not.
    wanted = [len(r.prompt) + r.params.max_tokens for r in group] + [1] * fill
    limit = np.array([min(w, target.max_model_len) for w in wanted], np.int32)
    capacity = capacity_for(int(limit.max()), decoder.width)
    tokens = np.zeros((batch, capacity), np.int32)
    for row, request in enumerate(group):
        tokens[row, : len(request.prompt)] = request.prompt
    reason = np.array([CONTEXT if w > target.max_model_len else LENGTH for w in wanted], np.int32)
    arguments = (
        target.params,
        drafter_params,
        *map(jnp.asarray, (tokens, lengths, limit, reason)),
        sampling_state(group, batch),
    )
    init, init_compile = compiled(decoder.for_prefill(), "init", *arguments)
    start = time.perf_counter()
    state = jax.block_until_ready(init(*arguments)).replace(counters=decoder.no_counts(batch))
    prefill = time.perf_counter() - start
    max_steps = jnp.int32(MAX_INT)
    run, run_compile = compiled(decoder, "run", target.params, drafter_params, state, max_steps)
    start = time.perf_counter()
    state = jax.block_until_ready(run(target.params, drafter_params, state, max_steps))
    decode = time.perf_counter() - start
    host = jax.device_get((state.tokens, state.length, state.finish, state.accepted, state.counters))
    return host, np.array([init_compile + run_compile, prefill, decode])


def _completion(target, request, host, row) -> Completion:
    tokens, length, finish, accepted, counters = host
    if counters.broken[row]:
        raise ValueError(
            f"{target.name} gave logits that are not numbers for prompt {request.prompt_index}; its weights are "
            f"damaged or overflow in {target.module.dtype}"
        )
    new = slice(len(request.prompt), int(length[row]))
    ids = tokens[row, new].tolist()
    reason = REASONS[int(finish[row])]
    stats = Stats(
        num_steps=int(counters.steps[row]),
        num_drafts=int(counters.drafts[row]),
        num_draft_tokens=int(counters.draft_tokens[row]),
        num_accepted_tokens=int(counters.accepted[row]),
        num_emitted_tokens=len(ids),
        acceptance_histogram=tuple(counters.histogram[row].tolist()),
        near_ties=int(counters.near_ties[row]),
    )
    return Completion(
        prompt_index=request.prompt_index,
        token_ids=ids,
        text=_text(target, ids[:-1] if reason == "stop" else ids),
        finish_reason=reason,
        seed=request.seed,
        accepted=accepted[row, new].tolist(),
        stats=stats,
    )


def _untouched(target, request, decoder) -> Completion:
    """A row that may not emit anything: no token was asked for, or the prompt fills the context."""
    return Completion(
        prompt_index=request.prompt_index,
        token_ids=[],
        text=_text(target, []),
        finish_reason="length" if request.params.max_tokens == 0 else "context",
        seed=request.seed,
        accepted=[],
        stats=Stats(acceptance_histogram=(0,) * (decoder.drafter.num_nodes + 1)),
    )


def _text(target, ids: list[int]) -> str | None:
    return None if target.tokenizer is None else target.tokenizer.decode(ids)
