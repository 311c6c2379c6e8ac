"""`asyncio.timeout`, also on Python 3.10.

There it comes from async-timeout, which aiohttp, and so vLLM, installs. It raises `asyncio.TimeoutError`, which is the
built-in one from 3.11 on.
"""

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["timeout"]
