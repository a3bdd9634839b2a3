"""x"""
from __future__ import annotations
from stagecached.consumer import Consumer
class Mutant:
    name=""; consumer=Consumer
BY_NAME: dict[str, Mutant] = {}
