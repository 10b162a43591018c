"""Passes that a GPU repeats by itself: recorded once as a CUDA graph, then started by one call.

    run(compute, inputs, key=...)     first time    computed as ever: libraries choose their kernels
                                      second time   recorded, then started
                                      from then on  the inputs are copied in, and it is started

One new token a row is little work and many kernels. With 0.5 billion weights and 32 rows on an
H200, a rollout takes 2.8 s in place of the 7.7 s in which the host launches each kernel
(benchmarks/results/gpu.md). A recording holds addresses. So what it reads and writes besides its
inputs (weights, keys, values) has to stay where it is until `forget`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    output: Tensor

    def start(self, inputs: Sequence[Tensor]) -> Tensor:
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        self.graph.replay()
        return self.output


class RecordedPasses:
    """Recordings by key; on a CPU, and where a pass cannot be recorded, it is computed as ever."""

    def __init__(self) -> None:
        self._recordings: dict[Hashable, _Recording | None] = {}
        self._refused = False

    def run(
        self, compute: Callable[..., Tensor], inputs: Sequence[Tensor], *, key: Hashable
    ) -> Tensor:
        """`compute(*inputs)`; inputs of the same key have the same shapes.

        The next pass overwrites the result.
        """
        if self._refused or not inputs[0].is_cuda:
            return compute(*inputs)
        if key not in self._recordings:
            self._recordings[key] = None
            return compute(*inputs)
        recording = self._recordings[key] or self._recorded(compute, inputs)
        if recording is None:
            return compute(*inputs)
        self._recordings[key] = recording
        return recording.start(inputs)

    def forget(self) -> None:
        """Weights, keys or values move."""
        self._recordings.clear()

    def _recorded(
        self, compute: Callable[..., Tensor], inputs: Sequence[Tensor]
    ) -> _Recording | None:
        own = [each.clone() for each in inputs]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream), _recording(graph):
                output = compute(*own)
        except RuntimeError as error:
            self._refused = True
            warnings.warn(
                "this model's passes cannot be recorded as CUDA graphs, so rollouts are slower: "
                f"{error}",
                stacklevel=2,
            )
            return None
        torch.cuda.current_stream().wait_stream(stream)
        return _Recording(graph, own, output)


@contextlib.contextmanager
def _recording(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Inside, what is asked of this thread's GPU is recorded. An error ends the recording too.

    `torch.cuda.graph` would also give all spare memory back to the driver, every time.
    """
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()
