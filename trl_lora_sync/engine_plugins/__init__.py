"""Code that runs inside an inference server's own process, next to which neither TRL nor PEFT need be installed.

Nothing here imports them, nor torch, nor the rest of this package.
"""
