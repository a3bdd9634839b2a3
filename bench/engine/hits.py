"""What the engine's prefix cache must give at a hit rate, to the token."""

from __future__ import annotations


def hit_tokens(prompt: int, rate: int, block_size: int) -> int:
    """Prompt tokens that are not computed where ``rate`` percent of a prompt are in the cache.

    Only full blocks hit, and the last token is always computed, since its logits are wanted (vLLM's
    ``KVCacheManager.get_computed_blocks``): a prompt that is cached as a whole computes its last block again.

    Args:
        prompt: tokens of the prompt.
        rate: percent of it that the cache has seen, 0 to 100.
        block_size: tokens in a KV block.
    """
    if not 0 <= rate <= 100:
        raise ValueError(f"a hit rate is 0 to 100 percent, not {rate}")
    cached = prompt * rate // 100
    return min(cached, prompt - 1) // block_size * block_size


def check_exact(prompt: int, rates: tuple[int, ...], block_size: int) -> None:
    """Refuse rates that are no whole number of blocks: the table would name a rate that no request has.

    Raises:
        ValueError: says what to change.
    """
    for rate in rates:
        if 100 * hit_tokens(prompt, rate, block_size) != rate * prompt:
            blocks = f"{prompt} tokens in blocks of {block_size}"
            raise ValueError(f"{rate} % of {blocks} is no whole number of blocks; choose another length of the prompt")
