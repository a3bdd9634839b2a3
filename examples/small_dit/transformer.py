"""The layers, a tile of tokens at a time.

A matrix product over more rows may take another kernel, and sum in another order: with a cached prefix the forward has
fewer rows, and its results would differ in their last bits. So tokens pass through the layers in tiles of fixed size
that lie at fixed positions, [i * tile, (i + 1) * tile), and a tile attends to a number of keys that its own tokens
decide. Each product then has the same shape and each token the same place in it, whatever else is computed; rows of a
tile that are not asked for are zeros. With blocks of whole tiles, KV depends on nothing but what its block's hash
covers, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, layer_norm, linear, softmax

from examples.small_dit.config import SmallDiTConfig
from examples.small_dit.layout import RowLayout
from examples.small_dit.lora import Lora
from stagecache.diffusion import RowQuery


@dataclass
class Layer:
    """Weights of one layer: query-key-value, output, and the two of the MLP, each [out, in]."""

    qkv: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def random(cls, config: SmallDiTConfig, draw: torch.Generator) -> Layer:
        def weights(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            return torch.randn(rows, columns, generator=draw) * (gain / columns**0.5)

        width, inner = config.width, config.width * config.mlp_ratio
        # Queries and keys large enough that attention is far from a mean over all tokens.
        qkv = torch.cat([weights(2 * width, width, 1.5), weights(width, width)])
        return cls(qkv, weights(width, width), weights(inner, width), weights(width, inner))


@dataclass
class _Tile:
    """Tokens [first, end) of a row, of which [low, end) are computed. keys: how many keys it attends to.

    mask: bool [tile, keys], True where a token does not see a key.
    """

    first: int
    low: int
    end: int
    keys: int
    mask: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    x: torch.Tensor
    query: torch.Tensor


class Transformer:
    """All layers.

    Attributes:
        computed_tokens: tokens that passed through the layers so far. computed_rows: with the padding of tiles.
    """

    def __init__(self, config: SmallDiTConfig, draw: torch.Generator) -> None:
        self._config = config
        self.layers = [Layer.random(config, draw) for _ in range(config.layers)]
        # One axis of positions takes each half of a head.
        quarter = config.head_dim // 4
        self._frequencies = 100.0 ** -(torch.arange(quarter, dtype=torch.float32) / quarter)
        self.computed_tokens = 0
        self.computed_rows = 0

    def adapted(self, lora: Lora | None) -> list[torch.Tensor]:
        """Query-key-value weights of every layer, with an adapter."""
        if lora is None:
            return [layer.qkv for layer in self.layers]
        return [layer.qkv + lora.delta(index) for index, layer in enumerate(self.layers)]

    def tiles(self, layout: RowLayout, start: int) -> list[_Tile]:
        """The tiles that hold positions [start, seq_len) of a row."""
        size, width = self._config.tile, self._config.width
        found: list[_Tile] = []
        for first in range(start // size * size, layout.seq_len, size):
            end = min(first + size, layout.seq_len)
            keys = -(-int(layout.sees[first:end].max()) // size) * size
            sees = torch.zeros(size, dtype=torch.int64)
            sees[: end - first] = layout.sees[first:end]
            # A row of padding sees the first key: a softmax over nothing would be no number.
            mask = torch.arange(keys)[None, :] >= sees.clamp(min=1)[:, None]
            places = torch.zeros(size, 2)
            places[: end - first] = layout.positions[first:end]
            angles = (places[:, :, None] * self._frequencies).reshape(size, 1, -1)
            empty = torch.zeros(size, width)
            found.append(_Tile(first, max(first, start), end, keys, mask, angles.cos(), angles.sin(), empty, empty))
        return found

    def forward(
        self,
        qkv_weights: Sequence[torch.Tensor],
        rows: Sequence[tuple[Sequence[_Tile], torch.Tensor, RowQuery]],
    ) -> list[torch.Tensor]:
        """Hidden states behind the last layer, [seq_len - start, width] for each row.

        rows: tiles, embedded tokens [seq_len - start, width], and where KV lies.
        """
        for tiles, hidden, query in rows:
            self.computed_tokens += sum(tile.end - tile.low for tile in tiles)
            self.computed_rows += len(tiles) * self._config.tile
            for tile in tiles:
                tile.x = torch.zeros(self._config.tile, self._config.width)
                tile.x[tile.low - tile.first : tile.end - tile.first] = hidden[
                    tile.low - query.start : tile.end - query.start
                ]
        for index, layer in enumerate(self.layers):
            for tiles, _, query in rows:
                for tile in tiles:
                    kv = self._project(qkv_weights[index], tile)
                    query.kv.write(index, tile.low, kv[tile.low - tile.first : tile.end - tile.first])
                kv = query.kv.read(index, max(tile.keys for tile in tiles))
                for tile in tiles:
                    self._attend(layer, tile, kv[: tile.keys])
        return [
            torch.cat([tile.x[tile.low - tile.first : tile.end - tile.first] for tile in tiles]) for tiles, _, _ in rows
        ]

    def _project(self, weights: torch.Tensor, tile: _Tile) -> torch.Tensor:
        """KV of a tile, [tile, 2, heads, head_dim]; its query is kept."""
        config = self._config
        normed = layer_norm(tile.x, (config.width,))
        query, key, value = linear(normed, weights).view(config.tile, 3, config.heads, config.head_dim).unbind(1)
        tile.query = _rotate(query, tile)
        return torch.stack([_rotate(key, tile), value], dim=1)

    def _attend(self, layer: Layer, tile: _Tile, kv: torch.Tensor) -> None:
        config = self._config
        query = tile.query.transpose(0, 1)  # [heads, tile, head_dim]
        keys, values = kv[:, 0].permute(1, 2, 0), kv[:, 1].transpose(0, 1)
        scores = torch.bmm(query, keys) / config.head_dim**0.5
        weights = softmax(scores.masked_fill(tile.mask, float("-inf")), dim=-1)
        mixed = torch.bmm(weights, values).transpose(0, 1).reshape(config.tile, config.width)
        tile.x = tile.x + linear(mixed, layer.out)
        inner = gelu(linear(layer_norm(tile.x, (config.width,)), layer.up))
        tile.x = tile.x + linear(inner, layer.down)


def _rotate(heads: torch.Tensor, tile: _Tile) -> torch.Tensor:
    """Rotary positions: heads, [tile, heads, head_dim], turned by row and column."""
    even, odd = heads[..., 0::2], heads[..., 1::2]
    return torch.stack([even * tile.cos - odd * tile.sin, even * tile.sin + odd * tile.cos], dim=-1).flatten(-2)
