"""The LoRA adapter: what can be served, its canonical form, and its versions on disk."""
