"""Code that runs inside an inference server's own process, next to which neither TRL nor PEFT need be installed.

Nothing here imports them, nor the rest of this package, nor anything that vLLM does not bring: the routes import
Starlette, what reads files and what runs in the workers torch and psutil, and the kernels Triton. The trainer's side,
whose environment has no Starlette, imports what is not of the routes. `vllm_push`, `vllm_fused` and `vllm_quick_load`
need the standard library only.
"""

import logging

# A child of the logger that vLLM sets up, so that its level and format hold here too.
logger = logging.getLogger("vllm.trl_lora_sync")
