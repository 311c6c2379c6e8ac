"""The body that carries an adapter's tensors to SGLang, built in one pass.

SGLang wants base64 of a pickled `dict[str, Tensor]`. Pickling tensors one by one writes a small archive for each of
them, and every further step copies the whole payload. Here all tensors are views of one storage that is written once,
into memory that is kept from one sync to the next, and base64 is made chunk by chunk while the request is sent.

Source: `load_lora_adapter_from_tensors` (srt/managers/io_struct.py; one string up to 0.5.16, one string per
tensor-parallel rank from 0.5.17) and the globals its unpickler admits (srt/utils/common.py `SafeUnpickler`, 0.5.23).
"""

import binascii
import json
import pickle
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import IO, Any, cast

import torch
from torch import Tensor

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.runtime import offload

_PLACE = "@tensors@"
_CHUNK_BYTES = 3 << 20  # a multiple of 3, so that no chunk but the last is padded


class TensorPayload:
    """Turns adapters into request bodies, one at a time; a body is valid until the next one is made."""

    def __init__(self) -> None:
        self._archive = bytearray()

    def body(self, adapter_name: str, adapter: CanonicalAdapter, *, per_rank: bool, tp_size: int) -> "LoadBody":
        """The JSON body of `/load_lora_adapter_from_tensors`.

        Args:
            per_rank: whether the server takes a list with one element per tensor-parallel rank (0.5.17 and later). A
                list that is too short kills the server.
            tp_size: tensor-parallel size of the server.
        """
        fields: dict[str, Any] = {"lora_name": adapter_name, "config_dict": adapter.config(), "pinned": False}
        fields |= {"serialized_named_tensors": [_PLACE] * tp_size} if per_rank else {"serialized_tensors": _PLACE}
        # Cut where the tensors go: with them, json.dumps would build and scan a string of their whole size.
        return LoadBody(json.dumps(fields).encode().split(_PLACE.encode()), self.pickle(adapter))

    def pickle(self, adapter: CanonicalAdapter) -> list[memoryview]:
        """Pickle the tensors of an adapter on the CPU as views of one storage, as consecutive pieces.

        The pieces unpickle with plain `pickle` and with the allow-list of every supported SGLang version.
        """
        pieces = _Pieces()
        pickler = _OneStoragePickler(pieces, adapter.flat, self._archive)
        pickler.dump(adapter.tensors)
        self._archive = pickler.archive
        return pieces.found


class LoadBody:
    """JSON with a long base64 string in one or more places, encoded again at each iteration."""

    def __init__(self, around: list[bytes], payload: list[memoryview]) -> None:
        self._around = around
        self._payload = payload

    def __len__(self) -> int:
        encoded = 4 * -(-sum(len(piece) for piece in self._payload) // 3)
        return sum(map(len, self._around)) + encoded * (len(self._around) - 1)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._around[0]
        for after in self._around[1:]:
            chunks = _base64(self._payload)
            # Encoding one chunk takes milliseconds, during which the loop would serve no other request.
            while chunk := await offload(partial(next, chunks, b"")):
                yield chunk
            yield after


class _Pieces:
    """A file that remembers what was written without joining it."""

    def __init__(self) -> None:
        self.found: list[memoryview] = []

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        # Only the pickler's large writes stay valid; the small ones are its own buffers.
        self.found.append(view if len(view) > _CHUNK_BYTES else memoryview(bytes(view)))
        return len(view)


class _OneStoragePickler(pickle.Pickler):
    """Pickles views of `flat`; the pickle memo writes their shared storage once.

    Args:
        archive: reused memory for the storage in the form that `torch.storage._load_from_bytes` reads.
    """

    def __init__(self, file: _Pieces, flat: Tensor, archive: bytearray) -> None:
        # Since protocol 5 the pickler knows PickleBuffer, which it writes without a copy.
        super().__init__(file, protocol=5)
        # What a tensor's own reduction wraps its storage in; the public constructor warns.
        self._storage = torch.storage.TypedStorage(
            wrap_storage=flat.untyped_storage(), dtype=flat.dtype, _internal=True
        )  # type: ignore[no-untyped-call]
        self.archive = archive

    def reducer_override(self, obj: Any) -> Any:
        if obj is self._storage:
            return torch.storage._load_from_bytes, (pickle.PickleBuffer(self._archived()),)
        if isinstance(obj, Tensor):
            view = (obj.storage_offset(), tuple(obj.shape), obj.stride())
            # At the end: requires_grad, and the hooks. torch writes an OrderedDict for these, which is one more global
            # that an unpickler must admit.
            return torch._utils._rebuild_tensor_v2, (self._storage, *view, False, {})
        return NotImplemented

    def _archived(self) -> memoryview:
        sink = _Rewriter(self.archive)
        # The format that a tensor's own reduction uses; the newer one takes a checksum of everything.
        torch.save(self._storage, cast(IO[bytes], sink), _use_new_zipfile_serialization=False)
        self.archive = sink.memory
        return memoryview(self.archive)[: sink.size].toreadonly()


class _Rewriter:
    """A file over existing memory, replaced only if it is too small; fresh pages are slow to touch in a VM."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        self.size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        end = self.size + len(view)
        if end > len(self.memory):  # not resized: an earlier body may still be looking at it
            self.memory = self.memory[: self.size] + bytearray(end - self.size)
        self.memory[self.size : end] = view
        self.size = end
        return len(view)

    def flush(self) -> None:
        pass


def _base64(pieces: list[memoryview]) -> Iterator[bytes]:
    left = b""
    for piece in pieces:
        start = 0
        if left:  # fill up to a multiple of 3 with the beginning of this piece
            start = min(-len(left) % 3, len(piece))
            left += bytes(piece[:start])
            if len(left) % 3:
                continue
            yield binascii.b2a_base64(left, newline=False)
        whole = start + (len(piece) - start) // 3 * 3
        for begin in range(start, whole, _CHUNK_BYTES):
            yield binascii.b2a_base64(piece[begin : min(begin + _CHUNK_BYTES, whole)], newline=False)
        left = bytes(piece[whole:])
    if left:
        yield binascii.b2a_base64(left, newline=False)
