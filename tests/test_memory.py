"""The compiled programs hold one copy of the cache: small temporaries, and no copy of a cache-shaped array."""

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest
from test_verify import rows_side_by_side, run_rule
from tiny import packed, script, tiny

from spec_jax import rule_names
from spec_jax.config import parse_speculative_config
from spec_jax.decode import Decoder
from spec_jax.decode_state import Rows, start_state
from spec_jax.drafting.base import Draft, DraftProbs, NoDrafter
from spec_jax.drafting.registry import build_drafter
from spec_jax.exactness import row_blocks
from spec_jax.generation import make_decoder
from spec_jax.requests import sampling_state

CAPACITY, BATCH = 4096, 2


def compile_run(drafter, params, exact=True, donate=True, auto=False):
    """The compiled `run` of a decoder and the bytes of the target's cache."""
    model = target(auto)
    init, run = make_decoder(model, drafter, batch=BATCH, exact=exact, verify_width="auto" if auto else None)
    tokens = jax.ShapeDtypeStruct((BATCH, CAPACITY), jnp.int32)
    row = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    state = jax.eval_shape(init, model.params, params, tokens, row, row, row, sampling_state([], BATCH))
    jitted = jax.jit(run, donate_argnums=(2,) if donate else ())
    compiled = jitted.lower(model.params, params, state, jnp.int32(100)).compile()
    one = state.cache.k[0]
    return compiled, one, 2 * one.size * one.dtype.itemsize


def target(is_packed=False):
    """Where rows that are not needed cost nothing, a policy may leave out work; it must not move the cache for that."""
    model = tiny(context=CAPACITY, layers=1 + is_packed)
    return packed(model) if is_packed else model


def cache_copies(compiled, slots):
    """Instructions of the loop that make a whole new array of the cache's shape by copying."""
    shape = ",".join(map(str, slots.shape))
    loop = [
        line
        for line in compiled.as_text().splitlines()
        if re.search(rf"= f32\[{shape}\]\S* (copy|concatenate)\(", line)
    ]
    return loop


def drafter_of(name, auto=False):
    """(drafter, its parameters)."""
    if name == "none":
        return NoDrafter(), ()
    if name == "script":
        return script([[1]] * BATCH, 3)
    model = target(auto)
    config = {"method": name} | ({"model": model} if name == "draft_model" else {})
    if name == "hybrid":
        config["drafters"] = [{"method": "ngram"}, {"method": "layer_skip"}]
    return build_drafter(parse_speculative_config(config), model, row_blocks(True, BATCH, 8, model.module))


# Without a cache of their own or the target's to write to, drafters are what "none" is.
NAMES = ["none", "layer_skip", "draft_model", *(pytest.param(n, marks=pytest.mark.slow) for n in ("script", "ngram"))]


@pytest.mark.parametrize("name", NAMES)
def test_the_loop_holds_one_copy_of_the_cache(name):
    drafter, params = drafter_of(name)
    compiled, slots, cache_bytes = compile_run(drafter, params)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < cache_bytes / 2
    assert memory.alias_size_in_bytes >= cache_bytes  # the donated state is updated in place
    assert cache_copies(compiled, slots) == []


@pytest.mark.parametrize("name", ["layer_skip", "draft_model", "hybrid"])
def test_work_that_is_left_out_copies_no_cache(name):
    """Under "auto" a step may draft nothing, and verification may begin behind the layers that have drafted."""
    drafter, params = drafter_of(name, auto=True)
    compiled, slots, cache_bytes = compile_run(drafter, params, auto=True)
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes / 2
    assert cache_copies(compiled, slots) == []


def test_power_a_state_that_is_not_donated_is_copied():
    compiled, slots, cache_bytes = compile_run(NoDrafter(), (), donate=False)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 0
    assert cache_copies(compiled, slots) or memory.output_size_in_bytes >= cache_bytes


def test_filling_a_slot_writes_one_row_in_place():
    """A refill costs the row it fills, not a copy of every row's cache."""
    model = tiny(context=CAPACITY, layers=1)
    decoder = Decoder(model.module, NoDrafter(), model.vocab_size, 8, "coupled", row_blocks(True, 8, 8), 32)
    row = jax.ShapeDtypeStruct((8,), jnp.int32)
    rows = Rows(row, row, row, jax.eval_shape(lambda: sampling_state([], 8)))
    whole, one = (jax.eval_shape(lambda batch=b: decoder.blank(model.params, (), batch, CAPACITY)) for b in (8, 1))
    tokens = jax.ShapeDtypeStruct((8, CAPACITY), jnp.int32)
    state = jax.eval_shape(start_state, tokens, rows, whole.cache, whole.drafter)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    prompt = jax.ShapeDtypeStruct((1, CAPACITY), jnp.int32)
    program = jax.jit(decoder.fill, donate_argnums=0).lower(state, one, prompt, row, count, rows).compile()
    memory, slots = program.memory_analysis(), state.cache.k[0]
    cache_bytes = 2 * slots.size * slots.dtype.itemsize
    assert memory.temp_size_in_bytes < cache_bytes / 8
    assert memory.alias_size_in_bytes >= cache_bytes
    assert cache_copies(program, slots) == []


def held_by(rule, nodes, side_by_side, batch=8, vocab=49152):
    """Bytes of the temporaries of a rule, and of the logits that it is given."""
    tokens, row = jax.ShapeDtypeStruct((batch, nodes), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    laws = DraftProbs(jax.ShapeDtypeStruct((batch, nodes, vocab), jnp.float32))
    logits = jax.ShapeDtypeStruct((batch, nodes + 1, vocab), jnp.float32)
    options, state = rule_names.options_of(rule, {}), jax.eval_shape(lambda: sampling_state([], batch))
    run = jax.jit(lambda *x: run_rule.__wrapped__(rule, *x, vocab, options))  # traces are kept with the function
    with rows_side_by_side() if side_by_side else contextlib.nullcontext():
        compiled = run.lower(logits, Draft(tokens, row, laws), state, row).compile()
    return compiled.memory_analysis().temp_size_in_bytes, logits.size * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule, side_by_side", [("coupled", False), ("traversal", False), *((rule, True) for rule in rule_names.RULES)]
)
def test_a_rule_holds_no_second_copy_of_the_logits(rule, side_by_side):
    """Both ways through `rows.over_rows`."""
    held, logits = held_by(rule, 7, side_by_side)
    assert held < logits


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["standard", "traversal"])
def test_what_a_rule_holds_does_not_grow_with_the_draft(rule):
    assert held_by(rule, 15, True)[0] < 1.1 * held_by(rule, 7, True)[0]
