"""Code that runs inside an inference server's own process, next to which neither TRL nor PEFT need be installed.

Nothing here imports them, nor the rest of this package. The routes (`routes`, `push_middleware`, `fused_middleware`)
import Starlette, which vLLM brings through FastAPI. What runs in vLLM's workers (`fused_placement`, `fused_weights`,
`vllm_fused_worker`, `vllm_quick_load_worker`) imports torch, and `fused_kernel` Triton. Everything else imports the
standard library only, above all `vllm_push`, `vllm_fused` and `vllm_quick_load`, which the trainer's side imports too.
"""

import logging

# A child of the logger that vLLM sets up, so that its level and format hold here too.
logger = logging.getLogger("vllm.trl_lora_sync")
