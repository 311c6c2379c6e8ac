"""Code that runs inside an inference server's own process, next to which neither TRL nor PEFT need be installed.

Nothing here imports them, nor the rest of this package. What runs in vLLM's workers (`fused_placement`,
`fused_weights`, `vllm_fused_worker`, `vllm_quick_load_worker`) imports torch, which is there, and `fused_kernel`
Triton; everything else the standard library only.
"""
