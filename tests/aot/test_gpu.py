"""The GPU kernel and the whole decode loop through the real compiler, for Hopper GPUs, on a machine without a GPU.

Needs the extra `aot`. What is compiled is never run: numbers, latency and memory speed stay open until a
device run.
"""

import os

os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # read by the compiler of the kernels: registers and spills on stdout

import functools
import re

import jax.numpy as jnp
import programs
import pytest
from jax.experimental import topologies

from spec_jax.kernels import block_sizes, gpu
from spec_jax.kernels.attention import attention

pytestmark = pytest.mark.aot
# What the plugin wants to know of a GPU, from NVIDIA's data sheets and the CUDA programming guide's table for 9.0.
DESCRIPTION = """
gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }} registers_per_core_limit: 65536
  registers_per_block_limit: 65536 }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }} runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""
DEVICES = {
    "h100": {"name": "NVIDIA H100 80GB HBM3", "bandwidth": 3352320000000, "memory": 84942979072},
    "h200": {"name": "NVIDIA H200", "bandwidth": 4800000000000, "memory": 150000000000},
}


@functools.cache
def device(name):
    config = DESCRIPTION.format(**DEVICES[name])
    return topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1").devices[0]


def spills(printed):
    """Bytes of spill stores of every kernel that was compiled, by name; and its registers."""
    pattern = r"entry function '(\w+)_mosaic_gpu_kernel'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    return [(name, int(lost), int(used)) for name, lost, used in re.findall(pattern, printed, re.DOTALL)]


@pytest.mark.parametrize("shape", programs.SHAPES, ids=programs.name_of)
def test_the_kernel_compiles_and_is_what_runs(shape, capfd):
    """Without a name too: the mesh's device says that it is a Hopper GPU. They all run the same code."""
    text = programs.compiled(device("h100"), attention, *programs.operands(*shape)).as_text()
    kernels = 1 if shape[4] <= block_sizes.SPLIT else 2  # one split needs no second kernel
    assert text.count('custom_call_target="mosaic_gpu') == kernels
    built = spills(capfd.readouterr().out)
    assert {kernel for kernel, *_ in built} == {"verification_attention", "combine_splits"} - (
        {"combine_splits"} if kernels == 1 else set()
    )
    # Sums of 256 columns, or float32 and its parts, are some registers too many for one warpgroup.
    allowed = 1024 if shape[3] > 128 or shape[5] == jnp.float32 else 0
    assert all(lost <= allowed and used <= 255 for _, lost, used in built), built


@pytest.mark.parametrize("capacity", [512, 1024], ids=["one split", "two splits"])
@pytest.mark.parametrize("head_dim", range(16, 273, 16))
def test_every_head_size_compiles_or_is_refused_before_tracing(head_dim, capacity):
    """And what the kernel refuses runs without it where no implementation is named."""
    shapes = programs.operands(5, 8, 4, head_dim, capacity, jnp.bfloat16, batch=1)
    taken = block_sizes.fits_gpu(shapes[0].shape, shapes[1].shape, jnp.bfloat16)
    assert taken == (head_dim <= 128 or head_dim == 256)
    if not taken:
        named = functools.partial(attention, implementation="mosaic_gpu")
        with pytest.raises(ValueError, match=f"head_dim={head_dim} must be"):
            programs.compiled(device("h100"), named, *shapes)
        if head_dim > 160:
            return  # the reference compiles alike for all of them
    text = programs.compiled(device("h100"), attention, *shapes).as_text()
    assert text.count('custom_call_target="mosaic_gpu') == (0 if not taken else 1 if capacity == 512 else 2)


@pytest.mark.parametrize("heads", [32, 8], ids=["two warpgroups", "one"])
def test_windows_and_soft_caps_compile_without_spilling(heads, capfd):
    function = functools.partial(attention, window=100, soft_cap=20.0, scale=0.1)
    program = programs.compiled(device("h100"), function, *programs.operands(8, heads, 2, 128, 1024, jnp.bfloat16))
    assert program.as_text().count('custom_call_target="mosaic_gpu') == 2
    built = spills(capfd.readouterr().out)
    assert len(built) == 2 and not any(lost for _, lost, _ in built), built


def test_the_cache_is_split_by_a_fixed_number_of_slots():
    """What the splits of 16 k slots leave behind is what a step holds beside its operands: sums, peaks and totals."""
    width, heads, kv_heads, head_dim, capacity, batch = 8, 32, 8, 128, 16384, 4
    shapes = programs.operands(width, heads, kv_heads, head_dim, capacity, jnp.bfloat16, batch)
    held = programs.compiled(device("h200"), attention, *shapes).memory_analysis().temp_size_in_bytes
    splits, rows = capacity // block_sizes.SPLIT, width * heads // kv_heads
    sums = batch * kv_heads * splits * (4 * rows * head_dim + 2 * 4 * 64)
    assert sums <= held <= 1.1 * sums + 2**20


def planted(sizes):
    options = {"scale": 1.0, "window": None, "soft_cap": None, "sizes": sizes}
    return lambda *x: gpu.attention(*x, **options)


@pytest.mark.parametrize(
    "sizes, message",
    [
        (block_sizes.GpuBlockSizes(rows=64, block=128, split=512, stages=4), "exceeds available shared memory"),
        (
            block_sizes.GpuBlockSizes(rows=64, block=72, split=576, stages=2),
            "must be a multiple of 64|compatible with the operand shape",
        ),
    ],
    ids=["too much shared memory", "a block that is no multiple of a tile"],
)
def test_a_planted_error_is_the_compilers_error(sizes, message):
    """The check that these tests can fail."""
    with pytest.raises(ValueError, match=message):
        programs.compiled(device("h100"), planted(sizes), *programs.operands(8, 32, 8, 128, 3840, jnp.bfloat16))


@pytest.mark.parametrize("name", DEVICES)
def test_the_whole_decode_loop_compiles_and_copies_no_cache(name):
    function, params, state = programs.loop(16, 16384, 8, **programs.SMALL)
    program = programs.compiled(device(name), function, params, state, donated=1)
    programs.check_loop(program, state, "mosaic_gpu", kernels=2)  # with that of the splits


@pytest.mark.parametrize("rule", ["traversal", "coupled"])
def test_a_loop_that_drafts_and_verifies_trees_compiles(rule):
    programs.check_tree_loop(device("h100"), rule, "mosaic_gpu", kernels=2)


def test_a_loop_at_full_depth_compiles():
    """Llama-3.2-3B, 8 sequences of 16384 slots."""
    function, params, state = programs.loop(8, 16384, 8, **programs.LLAMA_3B)
    program = programs.compiled(device("h100"), function, params, state, donated=1)
    memory = programs.check_loop(program, state, "mosaic_gpu", kernels=2)
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < DEVICES["h100"]["memory"]


def test_a_planted_copy_of_the_cache_is_seen():
    function, shapes = programs.loop_with_a_snapshot()
    program = programs.compiled(device("h100"), function, *shapes, donated=(2, 3))
    with pytest.raises(AssertionError, match="copy"):
        programs.check_in_place(program, shapes[2], layers=1)
    assert programs.copies(programs.looped(program.as_text()), shapes[2])


def test_an_exported_loop_comes_back():
    program = programs.exported(device("h200"), "cuda", "mosaic_gpu_v2")
    kernels = 2 * programs.SMALL["num_layers"]
    assert program.as_text().count('custom_call_target="mosaic_gpu_v2"') == kernels
