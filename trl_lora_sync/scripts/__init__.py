"""Scripts that `accelerate launch` runs, in a folder of their own because it comes first on their module path."""
