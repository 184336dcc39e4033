"""The TPU kernel and the whole decode loop through the real compiler, for five generations, on a machine without a TPU.

Needs the extra `aot`. What is compiled is never run: numbers, latency and memory speed stay open until a device run.
"""

import os

# For libtpu, which reads them when it is loaded: no warnings about a missing TPU, and several test processes at once.
os.environ.update(
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)

import functools

import jax.numpy as jnp
import programs
import pytest
from jax.experimental import topologies

from spec_jax.kernels import block_sizes, tpu
from spec_jax.kernels.attention import attention

pytestmark = pytest.mark.aot
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
every_generation = pytest.mark.parametrize("generation", TOPOLOGIES)
V6E_MEMORY = 32 * 2**30


@functools.cache
def device(generation):
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation]).devices[0]


@every_generation
@pytest.mark.parametrize("shape", programs.SHAPES, ids=programs.name_of)
def test_the_kernel_compiles_and_is_what_runs(generation, shape):
    """Without a name too: the mesh's device says that it is a TPU."""
    program = programs.compiled(device(generation), attention, *programs.operands(*shape))
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1


@every_generation
def test_windows_and_soft_caps_compile(generation):
    function = functools.partial(attention, window=100, soft_cap=20.0, scale=0.1)
    program = programs.compiled(device(generation), function, *programs.operands(8, 8, 2, 128, 1024, jnp.bfloat16))
    assert "tpu_custom_call" in program.as_text()


@pytest.mark.parametrize(
    "rows, block, message",
    [(128, 16384, "(?i)vmem"), (128, 1001, "divisible by 8")],
    ids=["more than 16 MB of VMEM", "a block that is no multiple of a tile"],
)
def test_a_planted_error_is_the_compilers_error(rows, block, message):
    """The check that these tests can fail."""
    options = {"scale": 1.0, "window": None, "soft_cap": None, "sizes": block_sizes.BlockSizes(rows, block, 1)}
    with pytest.raises(Exception, match=message):
        shapes = programs.operands(16, 32, 4, 128, 32768, jnp.bfloat16)
        programs.compiled(device("v5e"), lambda *x: tpu.attention(*x, **options), *shapes)


@every_generation
def test_the_whole_decode_loop_compiles_and_copies_no_cache(generation):
    function, params, state = programs.loop(16, 16384, 8, **programs.SMALL)  # a cache that no on-chip memory could hold
    program = programs.compiled(device(generation), function, params, state, donated=1)
    programs.check_loop(program, state, "tpu_custom_call", kernels=1)


@pytest.mark.parametrize("rule", ["kseq", "traversal", "coupled"])
def test_a_loop_that_drafts_and_verifies_trees_compiles(rule):
    programs.check_tree_loop(device("v5e"), rule, "tpu_custom_call", kernels=1)


def test_a_loop_at_full_depth_compiles():
    """Llama-3.2-3B, 8 sequences of 16384 slots."""
    function, params, state = programs.loop(8, 16384, 8, **programs.LLAMA_3B)
    program = programs.compiled(device("v6e"), function, params, state, donated=1)
    memory = programs.check_loop(program, state, "tpu_custom_call", kernels=1)
    assert memory.peak_memory_in_bytes < V6E_MEMORY


def test_a_planted_copy_of_the_cache_is_seen():
    function, shapes = programs.loop_with_a_snapshot()
    program = programs.compiled(device("v5e"), function, *shapes, donated=(2, 3))
    with pytest.raises(AssertionError, match="copy"):
        programs.check_in_place(program, shapes[2], layers=1)
    assert programs.copies(programs.looped(program.as_text()), shapes[2])


def test_heads_of_64_are_copied_at_the_edges_of_a_call_only():
    """A TPU stores them with the slots along the lanes, for half the room, and the kernel takes the head size there."""
    function, params, state = programs.loop(16, 8192, 8, **programs.SMALL | {"head_dim": 64})
    text = programs.compiled(device("v6e"), function, params, state, donated=1).as_text()
    assert not programs.copies(programs.looped(text), state.cache.k[0])


def test_an_exported_loop_comes_back():
    program = programs.exported(device("v5e"), "tpu", "tpu_custom_call")
    kernels = programs.SMALL["num_layers"]
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == kernels
