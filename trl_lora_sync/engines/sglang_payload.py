"""The body that carries an adapter's tensors to SGLang, built in one pass.

SGLang wants base64 of a pickled `dict[str, Tensor]`. Pickling tensors one by one writes a small archive for each of
them, which took over a second for 40 MB. Here all tensors are views of one buffer, and the buffer is written once.

Source: `load_lora_adapter_from_tensors` (srt/managers/io_struct.py; one string up to 0.5.16, one string per
tensor-parallel rank from 0.5.17) and the globals its unpickler admits (srt/utils/common.py `SafeUnpickler`, 0.5.23).
"""

import base64
import io
import json
import pickle
from typing import Any

import torch
from torch import Tensor

from trl_lora_sync.adapter.canonical import CanonicalAdapter

_PLACE = "@tensors@"


def load_body(adapter_name: str, adapter: CanonicalAdapter, *, per_rank: bool, tp_size: int) -> bytes:
    """The JSON body of `/load_lora_adapter_from_tensors`.

    Args:
        per_rank: whether the server takes a list with one element per tensor-parallel rank (0.5.17 and later). A list
            that is too short kills the server.
        tp_size: tensor-parallel size of the server.
    """
    fields = {"lora_name": adapter_name, "config_dict": adapter.config(), "pinned": False}
    encoded = base64.b64encode(pickle_tensors(adapter.tensors))
    if per_rank:
        head, tail = _around(fields | {"serialized_named_tensors": [_PLACE] * tp_size})
        separator = b'", "'
        return head + separator.join([encoded] * tp_size) + tail
    head, tail = _around(fields | {"serialized_tensors": _PLACE})
    return head + encoded + tail


def _around(fields: dict[str, Any]) -> tuple[bytes, bytes]:
    """JSON before the first and after the last placeholder, so that the payload itself is never scanned."""
    text = json.dumps(fields)
    head, tail = text[: text.index(_PLACE)], text[text.rindex(_PLACE) + len(_PLACE) :]
    return head.encode(), tail.encode()


def pickle_tensors(tensors: dict[str, Tensor]) -> bytes:
    """Pickle CPU tensors of one dtype as views of one storage.

    The result unpickles with plain `pickle` and with the allow-list of every supported SGLang version.
    """
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    views, start = {}, 0
    for name, tensor in tensors.items():
        views[name] = flat[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
    buffer = io.BytesIO()
    _OneStoragePickler(buffer, flat).dump(views)
    return buffer.getvalue()


class _OneStoragePickler(pickle.Pickler):
    """Pickles views of `flat`; the pickle memo writes their shared storage once."""

    def __init__(self, buffer: io.BytesIO, flat: Tensor) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        # What a tensor's own reduction wraps its storage in; the public constructor warns.
        self._storage = torch.storage.TypedStorage(
            wrap_storage=flat.untyped_storage(), dtype=flat.dtype, _internal=True
        )  # type: ignore[no-untyped-call]

    def reducer_override(self, obj: Any) -> Any:
        if obj is self._storage:
            archive = io.BytesIO()
            torch.save(
                obj, archive, _use_new_zipfile_serialization=False
            )  # as Tensor.__reduce__ does; no checksum pass
            return torch.storage._load_from_bytes, (archive.getvalue(),)
        if isinstance(obj, Tensor):
            return torch._utils._rebuild_tensor_v2, (
                self._storage,
                obj.storage_offset(),
                tuple(obj.shape),
                obj.stride(),
                False,
                {},
            )
        return NotImplemented
