"""Work on tensors that never move, captured once and repeated without Python or a launch for each operation.

It does not know what the work is. Whatever goes in or out lies in buffers of the caller's.
"""

from collections.abc import Callable

import torch

Work = Callable[[], None]
"""Reads and writes the same places in memory every time."""

Capture = Callable[[Work], Work]
"""Makes something that does the same work.

The work may run while it is captured, on whatever the buffers hold then.
"""


class CudaCapture:
    """Captures work as CUDA graphs, which share one pool of memory for what they need in between.

    Sharing is safe in any order, as long as one graph runs at a time and no result stays in the pool.
    """

    def __init__(self, device: torch.device) -> None:
        """Takes a stream for captures.

        Args:
            device: Where all of the work is done.
        """
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Captures work. It must neither wait for the device nor read anything back from it.

        Raises:
            RuntimeError: It does, or there is no memory.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                # Libraries set themselves up in the first call, which a capture does not allow.
                work()
            # Other threads may go on using the device: what they do is no part of the graph.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
            current.wait_stream(self._stream)
        return graph.replay


def capture_for(device: torch.device) -> Capture | None:
    """How work is captured on a device; None where it runs as it is."""
    return CudaCapture(device) if device.type == "cuda" else None
