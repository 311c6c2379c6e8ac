"""Scripts that `accelerate launch` runs, in a separate folder because it comes first on their module path."""
