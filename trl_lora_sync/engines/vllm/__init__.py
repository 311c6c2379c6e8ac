"""vLLM: `spec` describes it, `engine` talks to a stock server, `fused` to one with fused serving."""
