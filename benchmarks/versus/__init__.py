"""The parts of `benchmarks/vs_weights.py`."""
