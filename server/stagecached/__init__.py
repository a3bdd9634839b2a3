"""The cache daemon of a GPU node. ``stagecached.daemon`` composes it; ``python -m stagecached`` runs it."""
