"""The bytes of a request's body that is made while it is sent."""

from trl_lora_sync.engines.http import SizedBody
from trl_lora_sync.runtime import run


def bytes_of_body(body: SizedBody) -> bytes:
    async def joined() -> bytes:
        return b"".join([chunk async for chunk in body])

    return run(joined())
