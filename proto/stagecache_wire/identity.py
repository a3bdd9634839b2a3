"""What a block of tokens is called: the hash of its content and of all content before it.

The hash of block i is sha256 over the canonical CBOR of (hash of block i-1, its token ids, its extra keys), byte-equal
to vLLM 0.30.0's `sha256_cbor`, so that hashes made here and by an engine name the same block. Extra keys are what
tells apart blocks of equal token ids: the LoRA's name, each multimodal item in the block with its offset relative to
the block's start, the salt (first block only; the chain carries it on), the digest of the block's prompt embeddings;
in that order. Sha256 does not collide; that is what makes it safe to share blocks by name. Hashes that an engine made
itself are used as they are (a namespace says which).

Here every multimodal item that reaches into a block is in its keys. vLLM 0.30.0 leaves some out, so that blocks of
different images get one hash: of several items that lie in the prompt's last, unfilled block, all but the last (the
block is hashed when decoding fills it); of items that overlap, those behind the first that does not end in the block.
Only in these two cases do the hashes differ from vLLM's, and then a lookup by token ids misses. A third ambiguity
cannot be told apart in vLLM's own form, and so is here too: extra keys carry no labels, and a salt that spells the name
of a LoRA gives the first block (only) that LoRA's hash. Choose salts that cannot be adapter names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import repeat

from stagecache_wire import cbor
from stagecache_wire.cbor import TokenIds
from stagecache_wire.hash_errors import UnsupportedHash, UnsupportedKey

# The seed that vLLM hashes into the parent of the first block, where PYTHONHASHSEED does not give another.
DEFAULT_HASH_SEED = "vllm-none-hash"

HASH_BYTES = 32

# Digest of the embeddings of a block that lies behind the embedded prompt.
_NO_EMBEDDINGS = sha256().digest()

# Array of three; byte string of 32.
_TRIPLE_OF_HASH = b"\x83\x58\x20"
_NO_EXTRA_KEYS = cbor.encode(None)


@dataclass(frozen=True, slots=True)
class MultiModalSpan:
    """Where one multimodal item's placeholders lie: positions [offset, offset + length) of the prompt.

    identifier: digest of the item's content, as the engine computed it; equal content, equal identifier.
    """

    identifier: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What, beside its token ids, tells a request's content apart.

    lora_name       the adapter's name, which stands for its weights; None without one.
    mm_spans        multimodal items by rising offset.
    cache_salt      isolates those who share it from all others; None or "" for none.
    embeds_digests  of the prompt embeddings, one for each block that they reach into (see digest_prompt_embeds); None
                    where the prompt is token ids.
    """

    lora_name: str | None = None
    mm_spans: tuple[MultiModalSpan, ...] = ()
    cache_salt: str | None = None
    embeds_digests: tuple[bytes, ...] | None = None

    def __post_init__(self) -> None:
        offsets = [span.offset for span in self.mm_spans]
        if offsets != sorted(offsets):
            raise UnsupportedKey(f"multimodal items must come by rising offset, found offsets {offsets}")

    def of_blocks(self, block_size: int, first_block: int, num_blocks: int) -> list[tuple[cbor.Value, ...] | None]:
        """The extra keys of each of the blocks from first_block on; None for a block that has none."""
        shared: list[cbor.Value] = [] if self.lora_name is None else [self.lora_name]
        keys = [list(shared) for _ in range(num_blocks)]
        end_block = first_block + num_blocks
        for span in self.mm_spans:
            span_end_block = -(-span.end // block_size)
            for index in range(max(first_block, span.offset // block_size), min(end_block, span_end_block)):
                keys[index - first_block].append((span.identifier, span.offset - index * block_size))
        if first_block == 0 and num_blocks and self.cache_salt:
            keys[0].append(self.cache_salt)
        if self.embeds_digests is not None:
            for index, block_keys in enumerate(keys, first_block):
                embedded = index < len(self.embeds_digests)
                block_keys.append(self.embeds_digests[index] if embedded else _NO_EMBEDDINGS)
        return [tuple(block_keys) or None for block_keys in keys]


NO_EXTRA_KEYS = ExtraKeys()


def digest_prompt_embeds(rows: bytes | memoryview, row_bytes: int, block_size: int) -> tuple[bytes, ...]:
    """The digests of a prompt's embeddings, one for each block that they reach into, for ExtraKeys.embeds_digests.

    rows: the embeddings as they lie in memory, one row of row_bytes bytes a token.
    """
    data = memoryview(rows).cast("B")
    if row_bytes < 1 or len(data) % row_bytes:
        raise UnsupportedKey(f"{len(data)} bytes of prompt embeddings are not whole rows of {row_bytes} bytes")
    step = row_bytes * block_size
    return tuple(sha256(data[start : start + step]).digest() for start in range(0, len(data), step))


class BlockHasher:
    """Makes the chained hashes of full blocks of `block_size` tokens. Stateless after construction.

    seed: what the engine hashes into the parent of the first block (PYTHONHASHSEED, or vLLM's default).
    """

    def __init__(self, block_size: int, seed: str = DEFAULT_HASH_SEED) -> None:
        if block_size < 1:
            raise ValueError(f"a block of {block_size} tokens was asked for; give at least 1")
        self.block_size = block_size
        self.root_hash = sha256(cbor.encode(seed)).digest()
        self._array_head = cbor.encode_array_head(block_size)

    def hash_blocks(
        self,
        token_ids: TokenIds,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
        *,
        first_block: int = 0,
        parent_hash: bytes | None = None,
    ) -> list[bytes]:
        """Hashes of the full blocks in token_ids, which begin at block `first_block` of the request.

        parent_hash: of block first_block - 1; must be given exactly when first_block > 0. Hashing a request in parts
        gives the same hashes as hashing it at once.
        """
        if (first_block > 0) is not (parent_hash is not None) or first_block < 0:
            raise ValueError(f"block {first_block} was to be hashed {'with' if parent_hash else 'without'} a parent")
        parent = self.root_hash if parent_hash is None else parent_hash
        if len(parent) != HASH_BYTES:
            raise UnsupportedHash(f"the parent hash has {len(parent)} bytes, a sha256 has {HASH_BYTES}")
        encoded_blocks = cbor.encode_token_blocks(token_ids, self.block_size)
        extra_keys_of = self._encode_extra_keys(extra_keys, first_block, len(encoded_blocks))
        hashes: list[bytes] = []
        join, array_head = b"".join, self._array_head
        for encoded_tokens, encoded_extra_keys in zip(encoded_blocks, extra_keys_of, strict=False):
            parent = sha256(join((_TRIPLE_OF_HASH, parent, array_head, encoded_tokens, encoded_extra_keys))).digest()
            hashes.append(parent)
        return hashes

    def _encode_extra_keys(self, extra_keys: ExtraKeys, first_block: int, num_blocks: int) -> Iterable[bytes]:
        if num_blocks == 0 or extra_keys == NO_EXTRA_KEYS:
            return repeat(_NO_EXTRA_KEYS)
        return map(cbor.encode, extra_keys.of_blocks(self.block_size, first_block, num_blocks))


def check_hashes(block_hashes: Sequence[bytes]) -> None:
    """Raises UnsupportedHash unless every hash has the length of a sha256: an xxhash has half of it."""
    for position, block_hash in enumerate(block_hashes):
        if len(block_hash) != HASH_BYTES:
            raise UnsupportedHash(
                f"hash {position} has {len(block_hash)} bytes, a sha256 has {HASH_BYTES}; set the engine's "
                "prefix_caching_hash_algo to sha256 or sha256_cbor"
            )
