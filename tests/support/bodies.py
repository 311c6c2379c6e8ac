"""The bytes of a request's body that is made while it is sent."""

import torch

from trl_lora_sync.engine_plugins.checksum import checksum
from trl_lora_sync.engines.http import SizedBody
from trl_lora_sync.runtime import run


def bytes_of_body(body: SizedBody) -> bytes:
    async def joined() -> bytes:
        return b"".join([chunk async for chunk in body])

    return run(joined())


def checksum_of(body: bytes) -> str:
    """The checksum that a push sends with its body."""
    return checksum(torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(0))
