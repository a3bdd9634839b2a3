"""From a request to the sequence of each CFG row: token ids, where images lie, positions, and who sees whom.

    [begin | system text | image ... image | prompt, or that many no-prompt tokens | timestep, target image]
     `------------------- prefix: the same in every step ----------------------'   `- target: new in each -'

Text sees what stands before it; an image's tokens see that too and each other; the target sees everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from examples.small_dit.config import SmallDiTConfig
from examples.small_dit.request import ImageRequest

BEGIN, IMAGE, NO_PROMPT, TARGET = 256, 257, 258, 259
VOCABULARY = 260
"""Text is its UTF-8 bytes."""


@dataclass(frozen=True)
class ImageSpan:
    """Tokens [start, start + rows * columns) of a row are the reference image ``index``."""

    index: int
    start: int
    grid: tuple[int, int]

    @property
    def length(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class RowLayout:
    """One row. tokens: int64 [seq_len]. positions: float32 [seq_len, 2]. sees: int64 [seq_len], the end of what a
    token attends to.
    """

    tokens: torch.Tensor
    prefix_len: int
    spans: tuple[ImageSpan, ...]
    positions: torch.Tensor
    sees: torch.Tensor

    @property
    def seq_len(self) -> int:
        return len(self.tokens)


def lay_out(request: ImageRequest, config: SmallDiTConfig) -> tuple[RowLayout, ...]:
    """The rows of a request: with the prompt, and without it where guidance is not 1."""
    prompt = list(request.prompt.encode())
    rows = [_row(request, config, prompt)]
    if request.guidance != 1.0:
        rows.append(_row(request, config, [NO_PROMPT] * len(prompt)))
    return tuple(rows)


def _row(request: ImageRequest, config: SmallDiTConfig, prompt: list[int]) -> RowLayout:
    tokens = [BEGIN, *request.system.encode()]
    spans: list[ImageSpan] = []
    for index, image in enumerate(request.images):
        height, width, channels = image.shape
        if channels != 3 or height % config.patch or width % config.patch:
            raise ValueError(f"image of shape {image.shape}: needs [height, width, 3], sides multiples of 4")
        span = ImageSpan(index, len(tokens), (height // config.patch, width // config.patch))
        spans.append(span)
        tokens += [IMAGE] * span.length
    tokens += prompt
    prefix_len = len(tokens)
    target = ImageSpan(-1, prefix_len + 1, config.target)
    tokens += [TARGET] * (1 + target.length)
    places = torch.arange(len(tokens), dtype=torch.float32)[:, None].repeat(1, 2)
    sees = torch.arange(1, len(tokens) + 1)
    for span in (*spans, target):
        if request.positions == "grid":
            places[span.start : span.end] = _grid(span)
        sees[span.start : span.end] = span.end
    sees[prefix_len:] = len(tokens)
    return RowLayout(torch.tensor(tokens), prefix_len, tuple(spans), places, sees)


def _grid(span: ImageSpan) -> torch.Tensor:
    """[length, 2]: rows and columns, centred on the middle of the span."""
    rows, columns = span.grid
    middle = span.start + span.length / 2
    row = torch.arange(rows, dtype=torch.float32) - (rows - 1) / 2 + middle
    column = torch.arange(columns, dtype=torch.float32) - (columns - 1) / 2 + middle
    return torch.stack(torch.meshgrid(row, column, indexing="ij"), -1).reshape(-1, 2)
