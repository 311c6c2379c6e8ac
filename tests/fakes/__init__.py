"""Servers that obey each engine's real rules, on real sockets, without the engine."""
