"""GPU work on the tensors of an adapter that is the same at each sync, repeated by one launch.

At 8B an adapter has 504 matrices, and torch takes 2 to 4 ms to find out what to launch for all of them, in a process
that has done something else before. The GPU takes half a millisecond to carry it out (H100).
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trl_lora_sync.engine_plugins import logger
from trl_lora_sync.engine_plugins.collector import collector_paused


class Repeated:
    """Work on the same tensors each time, whatever they hold.

    On a GPU the first run records it as a CUDA graph, which later runs launch. Where a tensor has moved since, as by
    `model.to`, or the work cannot be recorded, it is done in the usual way, and recorded again by the second such run.

    Args:
        tensors: what it reads and writes; what it allocates is left out.
        work: does it without waiting for the device, and returns the result there.
    """

    def __init__(self, tensors: Sequence[Tensor], work: Callable[[], Tensor]) -> None:
        self._tensors = tensors
        self._work = work
        self._places: list[int] = []
        self._graph: Any = None
        self._result: Tensor | None = None
        self._can_record = tensors[0].is_cuda and len({one.device for one in tensors}) == 1

    def run(self) -> Tensor:
        """The result of the work; valid until the next run."""
        if not self._can_record:
            return self._work()
        # A recording has these addresses in it, and after a move the memory there may hold something else.
        places = [*map(Tensor.data_ptr, self._tensors)]
        if self._graph is not None and places == self._places:
            self._graph.replay()
            assert self._result is not None
            return self._result
        # Not at once after a move, as tensors that move each time would be recorded each time.
        is_recorded = places == self._places or not self._places
        self._places, self._graph = places, None
        # Before it is recorded, as torch compiles and allocates some things at the first use only.
        result = self._work()
        if is_recorded:
            self._record()
        return result

    def _record(self) -> None:
        try:
            self._graph, self._result = _recorded(self._work, self._tensors[0].device)
        except RuntimeError as error:
            self._can_record = False
            logger.info("Handling an adapter on the GPU takes longer, as it cannot be recorded: %s", error)


def _recorded(work: Callable[[], Tensor], device: torch.device) -> tuple[Any, Tensor]:
    """A CUDA graph of the work, and where its result will be.

    `torch.cuda.graph` would wait for the device, collect garbage and empty torch's cache first, which takes longer than
    many syncs.
    """
    # A stream for this alone, because CUDA cannot record the default stream.
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # Chosen here, because `_forget_recording` needs it after an error.
    pool = torch.cuda.graph_pool_handle()
    # What garbage has of the GPU may not be freed while work is recorded.
    with collector_paused(), torch.cuda.device(device), torch.cuda.stream(stream):
        try:
            # Other threads of the process, such as NCCL's, may use the device meanwhile.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        except RuntimeError:
            _forget_recording(device, pool)
            raise
    return graph, result


def _forget_recording(device: torch.device, pool: Any) -> None:
    """Undo what torch (2.11) leaves behind after an error.

    It would refuse to draw random numbers, and give none of its cached memory back.
    """
    generator: Any = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
