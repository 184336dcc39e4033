"""What the ahead-of-time tests compile, for a chip that is only described."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import tiny
from jax.sharding import Mesh, make_single_device_sharding

from spec_jax.decode import Decoder
from spec_jax.drafting.layer_skip import LayerSkipDrafter
from spec_jax.drafting.ngram import NGramDrafter
from spec_jax.drafting.tree_drafting import DynamicTree, StaticTree
from spec_jax.exactness import TILE
from spec_jax.models.config import LlamaConfig
from spec_jax.models.layers import RowBlocks
from spec_jax.models.llama import Llama, init_params

SMALL = {"num_layers": 3, "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024} | {
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 128,
}
LLAMA_3B = {"num_layers": 28, "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192} | {
    "num_heads": 24,
    "num_kv_heads": 8,
    "head_dim": 128,
}
# width, heads, kv_heads, head_dim, capacity, dtype
SHAPES = [
    (8, 9, 3, 64, 1280, jnp.bfloat16),  # SmolLM2-135M
    (16, 32, 4, 128, 4096, jnp.bfloat16),  # a full tile of 128 rows
    (4, 32, 8, 80, 384, jnp.bfloat16),
    (5, 32, 8, 96, 2048, jnp.bfloat16),
    (64, 16, 8, 256, 2048, jnp.bfloat16),
    (1, 64, 2, 128, 512, jnp.bfloat16),
    (3, 8, 8, 64, 512, jnp.float32),
]


def name_of(shape):
    return "-".join(str(x) for x in shape[:5]) + f"-{shape[5].__name__}"


def placed(chip, shapes):
    place = make_single_device_sharding(chip)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes)


def on(chip):
    """The context in which the program's kernels are chosen for `chip`."""
    return jax.set_mesh(Mesh(np.array([chip]), ("chip",)))


def compiled(chip, function, *shapes, donated=()):
    """`function` of arrays like `shapes`, compiled for one chip."""
    with on(chip):
        return jax.jit(function, donate_argnums=donated).lower(*placed(chip, shapes)).compile()


def operands(width, heads, kv_heads, head_dim, capacity, dtype, batch=4):
    """Of `attention`, for a chain."""
    cache = jax.ShapeDtypeStruct((batch, kv_heads, capacity, head_dim), dtype)
    return (
        jax.ShapeDtypeStruct((batch, width, heads, head_dim), dtype),
        cache,
        cache,
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct((1, width, -(-width // 32)), jnp.uint32),
    )


def loop(batch, capacity, width, drafter=None, rule="coupled", **config):
    """The decode loop of a Llama-shaped model, by default with n-gram drafts, and E2: function, parameters, state to
    donate."""
    config = LlamaConfig(max_position_embeddings=capacity, **config)
    module = Llama(config, "bfloat16")
    rows = RowBlocks(block=TILE, products=(), tile=TILE)
    decoder = Decoder(module, drafter or NGramDrafter(5), config.vocab_size, width, rule, rows, TILE)
    params = jax.eval_shape(lambda: init_params(module, 0))
    ints = jax.ShapeDtypeStruct((batch,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((batch, capacity), jnp.int32)
    sampling = jax.eval_shape(lambda: tiny.greedy_state(batch))
    state = jax.eval_shape(decoder.init, params, None, tokens, ints, ints, ints, sampling)
    return (lambda params, state: decoder.run(params, None, state, capacity)), params, state


def check_tree_loop(chip, rule, target, kernels):
    """That a loop whose drafts are trees of the model's own first two layers compiles and copies no cache.

    Drafts are written behind the text, and an accepted path is moved. Trees are sampled, or OPT-Tree's under `coupled`.
    """
    static = StaticTree((-1, -1, 0, 0, 1, 3), replacement=rule == "kseq")
    tree = DynamicTree(6, top_k=2, levels=3, threshold=0.5) if rule == "coupled" else static
    drafter = LayerSkipDrafter(6, (0, 1), sample=rule != "coupled", tree=tree)
    function, params, state = loop(16, 16384, 8, drafter, rule, **SMALL)
    program = compiled(chip, function, params, state, donated=1)
    layers = SMALL["num_layers"]
    assert program.as_text().count(f'custom_call_target="{target}') == kernels * (layers + 2)
    check_in_place(program, state.cache.k[0], layers)


def computations(text):
    """The computations of an HLO program, by name: their lines."""
    found, name = {}, None
    for line in text.splitlines():
        if line.endswith("{") and (head := re.match(r"(?:ENTRY )?%([\w.-]+) ", line)):
            found[name := head[1]] = []
        elif name is not None:
            found[name].append(line)
    return found


def looped(text):
    """The lines of all loop bodies of an HLO program, and of what they call."""
    found = computations(text)
    bodies = {name for lines in found.values() for line in lines for name in re.findall(r"body=%([\w.-]+)", line)}
    assert bodies
    reached, new = set(), bodies
    while new:
        reached |= new
        called = (re.findall(r"%([\w.-]+)", line) for name in new for line in found[name])
        new = {name for names in called for name in names if name in found} - reached
    return [line for name in reached for line in found[name]]


def copies(lines, array):
    """Those that copy an array of this shape."""
    kind = {"bfloat16": "bf16", "float32": "f32"}[jnp.dtype(array.dtype).name]
    shape = re.escape(f"{kind}[{','.join(map(str, array.shape))}]")
    return [line.split(", backend_config")[0] for line in lines if re.search(rf"= {shape}\S* copy\(", line)]


def check_in_place(program, cache, layers):
    """That a program changes its donated K and V, `layers` arrays like `cache` of each, where they are."""
    found = copies(program.as_text().splitlines(), cache)
    assert not found, found
    memory, size = program.memory_analysis(), cache.size * jnp.dtype(cache.dtype).itemsize
    assert memory.alias_size_in_bytes >= 2 * layers * size
    assert memory.temp_size_in_bytes < size  # a copy may hide in a fusion; it needs room all the same
    return memory


def check_loop(program, state, target, kernels):
    """That every layer runs `kernels` custom calls whose target begins with `target`, and nothing fell back."""
    layers = len(state.cache.k)
    assert program.as_text().count(f'custom_call_target="{target}') == kernels * layers
    return check_in_place(program, state.cache.k[0], layers)


def loop_with_a_snapshot():
    """A planted error: a loop that keeps the cache of before a step, to go back to."""

    def step(carry):
        x, ended, cache, _ = carry
        new = jax.lax.dynamic_update_slice(cache, x, (0, 0, 5, 0))
        return new[:, :, 7:8] * 2, x[:, 0, 0, 0] > 1, new, cache

    cache = jax.ShapeDtypeStruct((4, 8, 16384, 128), jnp.bfloat16)
    x, ended = jax.ShapeDtypeStruct((4, 8, 1, 128), jnp.bfloat16), jax.ShapeDtypeStruct((4,), bool)
    return (lambda *carry: jax.lax.while_loop(lambda c: ~c[1].all(), step, carry)), (x, ended, cache, cache)


def exported(chip, platform, target):
    """A loop exported for a platform, read back and compiled for a chip: what was exported, and the program.

    Its state is no pytree that `jax.export` knows, so its leaves are what goes in and out.
    """
    function, params, state = loop(4, 1024, 8, **SMALL)
    leaves, tree = jax.tree.flatten((params, state))

    def flat(*leaves):
        return jax.tree.leaves(function(*tree.unflatten(leaves)))

    checks = [jax.export.DisabledSafetyCheck.custom_call(target)]
    with on(chip):
        out = jax.export.export(jax.jit(flat), platforms=[platform], disabled_checks=checks)(*leaves)
    again = jax.export.deserialize(out.serialize())
    assert again.platforms == (platform,)
    assert [x.shape for x in again.out_avals] == [x.shape for x in leaves[-len(jax.tree.leaves(state)) :]]
    return compiled(chip, lambda *x: again.call(*x), *leaves)
