"""Verification attention on Hopper GPUs (Mosaic GPU): wgmma on tiles of 64 packed rows, K and V by TMA.

A block of threads takes one KV head, one tile and one split of the cache: a fixed number of slots at an absolute
position, so that a few sequences fill the GPU and a row's bits depend on nobody else. One warpgroup fetches KV blocks
some stages ahead; one or two compute, 64 rows each. A second kernel combines the splits of a row in order.

wgmma multiplies float32 in TF32, so float32 goes through it in three bfloat16 parts, which hold all its bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from spec_jax.kernels import hopper
from spec_jax.kernels.block_sizes import WARPGROUP_ROWS as ROWS
from spec_jax.kernels.block_sizes import GpuBlockSizes
from spec_jax.kernels.masks import MASKED
from spec_jax.kernels.packing import Packing

LOG2E = math.log2(math.e)
LAYOUT, ROW_LAYOUT = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


# Traced and lowered once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "sizes", "interpret"))
def attention(q, k, v, start, ancestors, *, scale, window, soft_cap, sizes: GpuBlockSizes, interpret=False):
    """See `spec_jax.kernels.attention.attention`, which checks the arguments."""
    batch, width, heads, head_dim = q.shape
    kv_heads, capacity = k.shape[1], k.shape[2]
    packing = Packing(width, kv_heads, heads // kv_heads, sizes.rows)
    bits, lowest = packing.masks(ancestors, start, window)
    flights = batch * packing.tiles  # one index finds what a block of threads works on
    packed = packing.queries(q).swapaxes(1, 2).reshape(flights, kv_heads, sizes.rows, head_dim)
    packed = jnp.stack(hopper.parts(packed), axis=2)
    task = _Task(
        sizes=sizes,
        tiles=packing.tiles,
        kv_heads=kv_heads,
        head_dim=head_dim,
        splits=-(-capacity // sizes.split),
        stored=sizes.rows if sizes.rows > ROWS else -(-packing.filled // 8) * 8,
        dtype=q.dtype,
        factor=LOG2E if soft_cap else scale * LOG2E,
        scale=scale,
        windowed=window is not None,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    lowest = lowest.reshape(flights, sizes.rows)
    limits = jnp.stack(
        [
            start,
            jnp.minimum(start + width, capacity),  # slots that are written
            lowest.reshape(batch, -1).min(1),
            lowest.reshape(batch, -1).max(1),
        ],
        axis=1,
    )
    parts = task.attend(limits, lowest, bits.reshape(flights, sizes.rows, -1).swapaxes(1, 2), packed, k, v)
    out = task.combine(limits, *parts) if task.splits > 1 else parts[0]
    return packing.outputs(out.reshape(batch, packing.tiles, kv_heads, task.stored, head_dim).swapaxes(1, 2))


@dataclasses.dataclass(frozen=True)
class _Task:
    """What the two kernels know when they are traced.

    Attributes:
      stored: rows of a tile that leave the chip.
      factor: of the scores before exp2, which is what the hardware has.
    """

    sizes: GpuBlockSizes
    tiles: int
    kv_heads: int
    head_dim: int
    splits: int
    stored: int
    dtype: Any
    factor: float
    scale: float
    windowed: bool
    soft_cap: float | None
    interpret: Any

    @property
    def warpgroups(self) -> int:
        """Those that compute."""
        return self.sizes.rows // ROWS

    @property
    def parts(self) -> int:
        """Of every number, in bfloat16."""
        return 3 if self.dtype == jnp.float32 else 1

    @property
    def weights_in_memory(self) -> bool:
        """Registers, from which wgmma takes them, have no room for three parts; interpreted, it takes nothing there."""
        return self.parts > 1 or bool(self.interpret)

    @property
    def chunks(self) -> list[slice]:
        """The columns of the output, in parts whose product and sum fit the registers together."""
        return [slice(c, min(c + 128, self.head_dim)) for c in range(0, self.head_dim, 128)]

    def kernel(self, body, name, out_type, grid, scratch, threads):
        """`body` of refs, for blocks of `threads` warpgroups over `grid`, a dict of named sizes."""
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch,
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            num_threads=threads,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=not self.soft_cap),  # its tanh has 11 bits
            interpret=self.interpret or None,
            kernel_name=name,
        )

    def blocks(self, limits_ref, sequence):
        """The KV blocks of a sequence: the first and one past the last."""
        block = self.sizes.block
        end = lax.div(limits_ref[sequence, 1] + block - 1, block)
        return jnp.minimum(lax.div(limits_ref[sequence, 2], block), end - 1), end

    def attend(self, limits, lowest, bits, q, k, v):
        """The outputs of every tile, or, where there are splits, what `combine` needs of each."""
        flights = q.shape[0]
        sizes, dim = self.sizes, self.head_dim
        stages, block = sizes.stages, sizes.block
        shape = flights, self.kv_heads, self.stored, dim
        if self.splits == 1:
            out_type = [jax.ShapeDtypeStruct(shape, self.dtype)]
        else:
            stats = jax.ShapeDtypeStruct((flights, self.kv_heads, self.splits, sizes.rows), jnp.float32)
            out_type = [
                jax.ShapeDtypeStruct((flights, self.kv_heads, self.splits, *shape[2:]), jnp.float32),
                stats,
                stats,
            ]
        out_dtype = out_type[0].dtype
        barriers = {
            "q": plgpu.Barrier(num_arrivals=self.parts, num_barriers=self.warpgroups),
            "k_full": plgpu.Barrier(num_barriers=stages),
            "v_full": plgpu.Barrier(num_barriers=stages),
            "k_free": plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=stages),
            "v_free": plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=stages),
            "clean": plgpu.Barrier(num_barriers=stages),
        }
        buffers = {
            "q": hopper.tiled((self.warpgroups, self.parts, ROWS, dim), jnp.bfloat16),
            "k": hopper.tiled((stages, block, dim), self.dtype),
            "v": hopper.tiled((stages, block, dim), self.dtype),
            "out": hopper.tiled((self.warpgroups, ROWS, self.chunks[0].stop), out_dtype),
            "peak": plgpu.SMEM((self.warpgroups, ROWS), jnp.float32),
            "total": plgpu.SMEM((self.warpgroups, ROWS), jnp.float32),
        }
        if self.parts > 1:
            buffers["parts"] = hopper.tiled((self.parts, block, dim), jnp.bfloat16)
        if self.weights_in_memory:
            buffers["weights"] = hopper.tiled((self.warpgroups, self.parts, ROWS, block), jnp.bfloat16, dim)

        def body(limits_ref, lowest_ref, bits_ref, q_ref, k_ref, v_ref, *refs):
            *outs, barrier, buffer = refs
            flight, head, split = lax.axis_index("flight"), lax.axis_index("head"), lax.axis_index("split")
            sequence = lax.div(flight, self.tiles)
            first, end = self.blocks(limits_ref, sequence)
            per_split = sizes.split // block
            first, end = jnp.maximum(first, split * per_split), jnp.minimum(end, (split + 1) * per_split)
            warpgroup = lax.axis_index("warpgroup")

            @pl.when((first < end) & (warpgroup == self.warpgroups))
            def _():
                if self.warpgroups > 1:  # 168 for each of three warpgroups are too few for two
                    plgpu.set_max_registers(40, action="decrease")
                self._fetch(k_ref.at[sequence, head], v_ref.at[sequence, head], buffer, barrier, first, end)

            @pl.when((first < end) & (warpgroup < self.warpgroups))
            def _():
                if self.warpgroups > 1:
                    plgpu.set_max_registers(232, action="increase")
                for i in range(self.parts):
                    source = q_ref.at[flight, head, i, pl.ds(warpgroup * ROWS, ROWS)]
                    plgpu.copy_gmem_to_smem(source, buffer["q"].at[warpgroup, i], barrier["q"].at[warpgroup])
                limit = [limits_ref[sequence, i] for i in (0, 1, 3)]
                rows = lowest_ref.at[flight, pl.ds(warpgroup * ROWS, ROWS)]
                bit = bits_ref.at[flight, :, pl.ds(warpgroup * ROWS, ROWS)]
                plgpu.barrier_wait(barrier["q"].at[warpgroup])
                sums, peak, total = self._compute(buffer, barrier, warpgroup, limit, rows, bit, first, end)
                self._store(buffer, outs, warpgroup, (flight, head, split), sums, peak, total)

        grid = {"split": self.splits, "head": self.kv_heads, "flight": flights}
        name = "verification_attention"
        call = self.kernel(body, name, out_type, grid, [barriers, buffers], self.warpgroups + 1)
        return call(limits, lowest, bits, q, k, v)

    def _fetch(self, k_ref, v_ref, buffer, barrier, first, end):
        """The fetching warpgroup: K and V blocks into the stages, as soon as these are free."""
        stages, block = self.sizes.stages, self.sizes.block

        def fetch(i, _):
            stage, slots = lax.rem(i, stages), pl.ds((first + i) * block, block)
            for name, ref in (("k", k_ref), ("v", v_ref)):

                @pl.when(i >= stages)
                def _(name=name):
                    plgpu.barrier_wait(barrier[f"{name}_free"].at[stage])

                plgpu.copy_gmem_to_smem(ref.at[slots], buffer[name].at[stage], barrier[f"{name}_full"].at[stage])

        lax.fori_loop(0, end - first, fetch, None)

    def _compute(self, buffer, barrier, warpgroup, limit, lowest_ref, bits_ref, first, end):
        """The online softmax over KV blocks first..end: sums [ROWS, head_dim] by chunks, peaks and totals [ROWS]."""
        block, stages = self.sizes.block, self.sizes.stages
        start, written, windows = limit

        def step(i, carry, masked):
            sums, old, total = carry
            stage, slot = lax.rem(i, stages), (first + i) * block
            plgpu.barrier_wait(barrier["k_full"].at[stage])
            keys, queries = self._operands(buffer, "k", stage), buffer["q"].at[warpgroup]
            queries = [queries.at[i] for i in range(self.parts)]
            scores = hopper.product(queries, [x.transpose((1, 0)) for x in keys], (ROWS, block))
            plgpu.barrier_arrive(barrier["k_free"].at[stage])
            if self.soft_cap:
                scores = self.soft_cap * jnp.tanh(scores * (self.scale / self.soft_cap))
            seen = self._seen(slot, start, lowest_ref, bits_ref) if masked else None
            if masked:
                scores = jnp.where(seen, scores, MASKED)
            peak = jnp.maximum(old, scores.max(axis=1))
            # The difference first: a product in front of it may become one instruction with it, or not.
            weights = jnp.exp2((scores - hopper.across(peak, scores.shape)) * self.factor)
            if masked:  # a row that sees nothing here has its peak at MASKED, where every weight would be 1
                weights = jnp.where(seen, weights, 0.0)
            shrink = jnp.exp2((old - peak) * self.factor)
            total = total * shrink + weights.sum(axis=1)
            weights = hopper.parts(weights.astype(self.dtype))
            if self.weights_in_memory:
                for i, x in enumerate(weights):
                    buffer["weights"].at[warpgroup, i][...] = x
                plgpu.commit_smem()
                weights = [buffer["weights"].at[warpgroup, i] for i in range(self.parts)]
            plgpu.barrier_wait(barrier["v_full"].at[stage])
            if masked:
                self._clean(buffer["v"].at[stage], barrier["clean"].at[stage], warpgroup, written - slot)
            values = self._operands(buffer, "v", stage)
            added = []
            for chunk, held in zip(self.chunks, sums, strict=True):
                columns = [x.at[:, pl.ds(chunk.start, chunk.stop - chunk.start)] for x in values]
                added.append(held * hopper.across(shrink, held.shape) + hopper.product(weights, columns, held.shape))
            plgpu.barrier_arrive(barrier["v_free"].at[stage])
            return added, peak, total

        carry = self._nothing()
        # Most blocks hold committed slots alone, inside the window of all rows, and need no mask.
        count = end - first
        committed = jnp.clip(lax.div(start, block) - first, 0, count)
        inside = 0
        if self.windowed:
            inside = jnp.clip(lax.div(windows + block - 1, block) - first, 0, committed)
            carry = lax.fori_loop(0, inside, functools.partial(step, masked=True), carry)
        carry = lax.fori_loop(inside, committed, functools.partial(step, masked=False), carry)
        return lax.fori_loop(committed, count, functools.partial(step, masked=True), carry)

    def _operands(self, buffer, name, stage):
        """The parts of a stage's block in shared memory, for wgmma."""
        ref = buffer[name].at[stage]
        if self.parts == 1:
            return [ref]
        for i, x in enumerate(hopper.parts(hopper.load(ref, LAYOUT))):
            buffer["parts"].at[i][...] = x
        plgpu.commit_smem()
        return [buffer["parts"].at[i] for i in range(self.parts)]

    def _seen(self, slot, start, lowest_ref, bits_ref):
        """What each row sees of the block from `slot` on, bool [ROWS, block]."""
        shape = ROWS, self.sizes.block
        slots = slot + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=LAYOUT)
        bit = jnp.maximum(slots - start + 1, 0)  # bit 0 stands for all committed slots
        hit = plgpu.layout_cast(jnp.zeros(shape, jnp.uint32), LAYOUT)
        for word in range(bits_ref.shape[0]):
            held = hopper.across(hopper.load(bits_ref.at[word], ROW_LAYOUT), shape)
            one = jnp.where((bit >> 5) == word, (held >> (bit & 31).astype(jnp.uint32)) & 1, jnp.uint32(0))
            hit = hit | one
        seen = hit != 0
        if self.windowed:
            seen = seen & (slots >= hopper.across(hopper.load(lowest_ref, ROW_LAYOUT), shape))
        return seen

    def _clean(self, v_ref, barrier, warpgroup, unwritten):
        """Zeros from slot `unwritten` of a block on, which nobody has written: a zero weight does not silence a NaN."""
        shape = self.sizes.block, self.head_dim

        @pl.when(unwritten < self.sizes.block)
        def _():
            @pl.when(warpgroup == 0)
            def _():
                slots = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LAYOUT)
                v_ref[...] = jnp.where(slots < unwritten, hopper.load(v_ref, LAYOUT), jnp.zeros((), self.dtype))
                plgpu.commit_smem()
                plgpu.barrier_arrive(barrier)

            plgpu.barrier_wait(barrier)

    def _store(self, buffer, outs, warpgroup, place, sums, peak, total):
        """The output of a tile, or what is known of it behind one split."""
        tile, rows = buffer["out"].at[warpgroup], min(ROWS, self.stored)
        if self.splits == 1:
            sums, place = self._divide(sums, total), place[:2]
        else:
            for name, x, out in (("peak", peak, outs[1]), ("total", total, outs[2])):
                buffer[name].at[warpgroup][...] = x
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer[name].at[warpgroup], out.at[(*place, pl.ds(warpgroup * ROWS, ROWS))])
        out = outs[0].at[(*place, pl.ds(warpgroup * ROWS, rows))]
        for chunk, x in zip(self.chunks, sums, strict=True):
            columns = pl.ds(0, chunk.stop - chunk.start)
            tile.at[:, columns][...] = x.astype(out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, rows), columns], out.at[:, pl.ds(chunk.start, columns.size)])
            plgpu.wait_smem_to_gmem(0)

    def _divide(self, sums, total):
        """A row that saw nothing at all is 0."""
        total = jnp.where(total == 0, 1.0, total)
        return [x / hopper.across(total, x.shape) for x in sums]

    def combine(self, limits, sums, peaks, totals):
        """The outputs of every tile from its splits, added in order."""
        flights, dim, stages = sums.shape[0], self.head_dim, 2
        rows = min(ROWS, self.stored)
        per_split = self.sizes.split // self.sizes.block

        def body(limits_ref, sums_ref, peaks_ref, totals_ref, out_ref, tiles, result, barrier):
            flight, head, part = lax.axis_index("flight"), lax.axis_index("head"), lax.axis_index("part")
            first, end = self.blocks(limits_ref, lax.div(flight, self.tiles))
            first, end = lax.div(first, per_split), lax.div(end + per_split - 1, per_split)

            def fetch(split, stage):
                source = sums_ref.at[flight, head, split, pl.ds(part * ROWS, rows)]
                plgpu.copy_gmem_to_smem(source, tiles.at[stage, pl.ds(0, rows)], barrier.at[stage])

            def stats(ref, split):
                return hopper.load(ref.at[flight, head, split, pl.ds(part * ROWS, ROWS)], ROW_LAYOUT)

            def add(split, carry):
                sums, old, total = carry
                stage = lax.rem(split - first, stages)

                @pl.when(split + 1 < end)
                def _():
                    fetch(split + 1, stages - 1 - stage)

                own = stats(peaks_ref, split)
                peak = jnp.maximum(old, own)
                shrink = jnp.exp2((old - peak) * self.factor)
                weight = jnp.exp2((own - peak) * self.factor)
                total = total * shrink + stats(totals_ref, split) * weight
                plgpu.barrier_wait(barrier.at[stage])
                added = []
                for chunk, held in zip(self.chunks, sums, strict=True):
                    x = hopper.load(tiles.at[stage, :, pl.ds(chunk.start, chunk.stop - chunk.start)], LAYOUT)
                    added.append(held * hopper.across(shrink, held.shape) + x * hopper.across(weight, held.shape))
                plgpu.commit_smem()  # read, before the next copy into it
                return added, peak, total

            fetch(first, 0)
            sums, _, total = lax.fori_loop(first, end, add, self._nothing())
            for chunk, x in zip(self.chunks, self._divide(sums, total), strict=True):
                result.at[:, pl.ds(chunk.start, chunk.stop - chunk.start)][...] = x.astype(self.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result.at[pl.ds(0, rows)], out_ref.at[flight, head, pl.ds(part * ROWS, rows)])
            plgpu.wait_smem_to_gmem(0)

        out = jax.ShapeDtypeStruct((flights, self.kv_heads, self.stored, dim), self.dtype)
        scratch = [
            hopper.tiled((stages, ROWS, dim), jnp.float32),
            hopper.tiled((ROWS, dim), self.dtype),
            plgpu.Barrier(num_barriers=stages),
        ]
        grid = {"part": self.warpgroups, "head": self.kv_heads, "flight": flights}
        return self.kernel(body, "combine_splits", out, grid, scratch, 1)(limits, sums, peaks, totals)

    def _nothing(self):
        """Sums, peaks and totals before the first slot."""

        def full(shape, value, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        sums = [full((ROWS, c.stop - c.start), 0, LAYOUT) for c in self.chunks]
        return sums, full((ROWS,), MASKED, ROW_LAYOUT), full((ROWS,), 0, ROW_LAYOUT)
