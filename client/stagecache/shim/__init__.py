"""Shims that put a row cache under an engine's model runner. Importing this package imports no engine and no torch."""
