"""What the software adds to the roofline: gaps between kernels, dispatch from the host, and work between the steps.

The roofline knows a chip's published peaks only. Software reaches a part of them, and a step of few rows is so short
that two more things count. On the device every kernel waits for the last block of the one before it and fills its
pipeline anew: `kernel_gap`. On the host an eager framework dispatches one operation after another, and where that takes
longer than the device computes, the device waits: `dispatch`. A one-layer drafter pays both for one layer, the target
for all of its layers, so speed-ups depend on them though both sides run on the same chip.

The figures are counts times a time per kernel or operation, for all models and drafters alike; none is fitted to a
speed-up. `experiments/paper_speedups.py` compares plain step times and speed-ups with published ones, with and without.
"""

from __future__ import annotations

import dataclasses

STREAMING = 0.85
"""Of the data sheet's bandwidth, what copies and products that stream weights reach on HBM and GDDR (0.8 to 0.92)."""
DENSE = 0.7
"""Of the data sheet's operations, what large dense products in bfloat16 reach (0.6 to 0.75)."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """One way of running a model.

    Attributes:
      name: as `--stack` takes it.
      title: for tables.
      bandwidth_share, compute_share: of the published peaks, what is reached.
      kernel_gap: seconds that the device idles between two dependent kernels.
      layer_kernels, pass_kernels: kernels of one layer, and of a forward pass beside its layers.
      dispatch: seconds in which the host dispatches one operation; 0: a whole pass is launched at once.
      layer_operations, pass_operations: operations dispatched for a layer, and beside the layers.
      level_operations, node_operations: dispatched for every level of a draft tree beside the drafter's pass, and for
        every node of it.
      plain_host: seconds of the host between two plain steps that no device work hides.
      drafted_host: the same for speculative steps.
    """

    name: str
    title: str
    bandwidth_share: float = 1.0
    compute_share: float = 1.0
    kernel_gap: float = 0.0
    layer_kernels: int = 0
    pass_kernels: int = 0
    dispatch: float = 0.0
    layer_operations: int = 0
    pass_operations: int = 0
    level_operations: int = 0
    node_operations: int = 0
    plain_host: float = 0.0
    drafted_host: float = 0.0

    def gaps(self, layers: int) -> float:
        """Seconds of a forward pass of `layers` layers in which the device idles between kernels."""
        return self.kernel_gap * (layers * self.layer_kernels + self.pass_kernels)

    def host(self, layers: int) -> float:
        """Seconds that the host needs to dispatch such a pass, while the device may already compute."""
        return self.dispatch * (layers * self.layer_operations + self.pass_operations)

    def tree(self, levels: int, nodes: int) -> float:
        """Seconds in which the host builds a draft tree around the drafter's passes."""
        return self.dispatch * (levels * self.level_operations + nodes * self.node_operations)


IDEAL = Stack("ideal", "published peaks, nothing beside")
_GRAPHS = Stack(
    "vllm",
    "CUDA graphs, the host in turn with the device (vLLM)",
    STREAMING,
    DENSE,
    kernel_gap=3e-6,
    # Norm, QKV, rotation, cache write, attention, output, norm, gate and up, activation, down. Beside them embedding,
    # final norm, head, sampling, and a graph's launch, which takes as long as 20 kernels.
    layer_kernels=10,
    pass_kernels=30,
    plain_host=1e-3,  # scheduling, token ids, input tensors; plain steps of 8B on an H100 take 0.8 ms beyond the graph
    drafted_host=1e-3,
)
STACKS = {
    stack.name: stack
    for stack in (
        IDEAL,
        # 15 fusions per layer, with a microsecond of start and drain each; the loop runs on the device.
        Stack("xla", "one compiled loop (XLA)", STREAMING, DENSE, kernel_gap=1e-6, layer_kernels=15, pass_kernels=10),
        _GRAPHS,
        # Its scheduler works while the device computes; a speculative step has to wait for the accepted tokens first.
        dataclasses.replace(
            _GRAPHS, name="sglang", title="CUDA graphs, plain steps scheduled ahead (SGLang)", plain_host=0.0
        ),
        # Counted in the Llama of transformers 5.24 with eager attention: 61 operations of a layer, 46 of them kernels,
        # and 47 and 31 beside the layers. 10 us each: Python, dispatcher, allocator and launch take 5 to 20. `generate`
        # takes 2 ms per token beside the forward pass on a current CPU core (logits processors, stopping, masks).
        # Counted in EAGLE's public code: 25 operations to extend a level (log-softmax, two top-k, gathers, the mask)
        # and 3 per node for the mask of the finished tree. Every method compares the paths, gathers the accepted one
        # and rolls two arrays per layer back: 150 operations for 40 layers, 1.5 ms.
        Stack(
            "eager",
            "eager PyTorch (transformers)",
            STREAMING,
            DENSE,
            kernel_gap=3e-6,
            layer_kernels=46,
            pass_kernels=31,
            dispatch=10e-6,
            layer_operations=61,
            pass_operations=47,
            level_operations=25,
            node_operations=3,
            plain_host=2e-3,
            drafted_host=3.5e-3,
        ),
    )
}


def find_stack(name: str) -> Stack:
    """The stack of that name. ValueError names the known ones."""
    if name not in STACKS:
        raise ValueError(f"stack={name!r} is not known; allowed: {', '.join(STACKS)}")
    return STACKS[name]
