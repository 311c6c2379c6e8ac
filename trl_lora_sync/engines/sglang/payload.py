"""The body that carries an adapter's tensors to SGLang.

SGLang wants base64 of a pickled `dict[str, Tensor]`. Pickling tensors one by one writes a small archive for each of
them. Here all tensors are views of one storage that is written once, and base64 is made chunk by chunk while the
request is sent.

Source: `load_lora_adapter_from_tensors` (srt/managers/io_struct.py; one string up to 0.5.16, one string per
tensor-parallel rank from 0.5.17) and the globals its unpickler admits (srt/utils/common.py `SafeUnpickler`, 0.5.23).
"""

import binascii
import io
import json
import pickle
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.runtime import offload

_PLACE = "@tensors@"
_CHUNK_BYTES = 3 << 20


class LoadBody:
    """The JSON body of `/load_lora_adapter_from_tensors`, encoded again at each iteration.

    Args:
        per_rank: whether the server takes a list with one element per tensor-parallel rank (0.5.17 and later). A list
            that is too short kills the server.
        tp_size: tensor-parallel size of the server.
    """

    def __init__(self, adapter_name: str, adapter: CanonicalAdapter, *, per_rank: bool, tp_size: int) -> None:
        fields: dict[str, Any] = {"lora_name": adapter_name, "config_dict": adapter.config(), "pinned": False}
        fields |= {"serialized_named_tensors": [_PLACE] * tp_size} if per_rank else {"serialized_tensors": _PLACE}
        # Cut where the tensors go: with them, json.dumps would build and scan a string of their whole size.
        self._around = json.dumps(fields).encode().split(_PLACE.encode())
        self._payload = pickled(adapter)

    def __len__(self) -> int:
        encoded = 4 * -(-sum(map(len, self._payload)) // 3)
        return sum(map(len, self._around)) + encoded * (len(self._around) - 1)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._around[0]
        for after in self._around[1:]:
            rest = b""
            for piece in self._payload:
                for start in range(0, len(piece), _CHUNK_BYTES):
                    # Encoding one chunk takes milliseconds, during which the loop would serve no other request.
                    chunk, rest = await offload(partial(_base64, rest, piece[start : start + _CHUNK_BYTES]))
                    yield chunk
            yield binascii.b2a_base64(rest, newline=False)
            yield after


def _base64(before: bytes, chunk: memoryview) -> tuple[bytes, bytes]:
    """Base64 of all whole groups of three bytes, which needs no padding, and the bytes after them."""
    data = before + chunk
    whole = len(data) // 3 * 3
    return binascii.b2a_base64(data[:whole], newline=False), data[whole:]


def pickled(adapter: CanonicalAdapter) -> list[memoryview]:
    """The tensors of an adapter on the CPU, pickled as views of one storage, in consecutive pieces.

    They unpickle with plain `pickle` and with the allow-list of every supported SGLang version.
    """
    pieces = _Pieces()
    _OneStoragePickler(pieces, adapter.flat).dump(adapter.tensors)
    return pieces


class _Pieces(list[memoryview]):
    """A file that keeps what is written without joining it, as that would copy all tensors once more."""

    def write(self, data: Any) -> int:
        self.append(memoryview(bytes(data)))  # no copy of the archive, which is bytes already
        return len(data)


class _OneStoragePickler(pickle.Pickler):
    """Pickles views of `flat`; the pickle memo writes their shared storage once."""

    def __init__(self, file: _Pieces, flat: Tensor) -> None:
        super().__init__(file)
        # What a tensor's own reduction wraps its storage in; the public constructor warns.
        self._storage = torch.storage.TypedStorage(
            wrap_storage=flat.untyped_storage(), dtype=flat.dtype, _internal=True
        )  # type: ignore[no-untyped-call]

    def reducer_override(self, obj: Any) -> Any:
        if obj is self._storage:
            archive = io.BytesIO()
            # The format that a tensor's own reduction uses; the newer one takes a checksum of everything.
            torch.save(self._storage, archive, _use_new_zipfile_serialization=False)
            return torch.storage._load_from_bytes, (archive.getvalue(),)
        if isinstance(obj, Tensor):
            view = (obj.storage_offset(), tuple(obj.shape), obj.stride())
            # At the end: requires_grad, and the hooks. torch writes an OrderedDict for these, which is one more global
            # that an unpickler must admit.
            return torch._utils._rebuild_tensor_v2, (self._storage, *view, False, {})
        return NotImplemented
