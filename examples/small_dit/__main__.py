"""Make images with the small DiT and a daemon of its own, and say what each request computed.

python -m examples.small_dit --prompt "a red boat" --prompt "a blue whale" --prompt "a red boat" --out boat.ppm
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from examples.small_dit import MODEL_NAME, ImageRequest, SmallDiT, SmallDiTConfig
from stagecache.diffusion import DiffusionConfig, DiffusionKVMode, DiffusionStage, NodeStore
from stagecache.local_daemon import LocalDaemon

BLOCK_SIZE = 32
SIZES = SmallDiTConfig(layers=6, width=256, heads=4, target=(8, 8), tile=BLOCK_SIZE)


def main() -> None:
    """One line a request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", action="append", help="a request; may be given again (default: one, three times)")
    parser.add_argument("--socket", help="a daemon that runs with --shared-bytes (default: one is started)")
    parser.add_argument("--out", type=Path, help="write the last image to this file, as PPM")
    parser.add_argument("--no-prefix-caching", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = SmallDiT(SIZES)
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    with ExitStack() as stack:
        node: NodeStore | None = None
        if not options.no_prefix_caching:
            socket = options.socket
            if socket is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                socket = stack.enter_context(LocalDaemon(folder, arguments=["--shared-bytes", "256MiB"])).socket
            node = NodeStore.attach(socket, model.kv_shape, model=MODEL_NAME, stage="dit", block_size=BLOCK_SIZE)
            stack.callback(node.close)
        config = DiffusionConfig(
            MODEL_NAME,
            DiffusionKVMode.PAGED_SCHEDULER,
            enable_prefix_caching=node is not None,
            block_size=BLOCK_SIZE,
        )
        stage = DiffusionStage(config, model, node)
        for index, prompt in enumerate(options.prompt or ["a red boat"] * 3):
            before, begun = stage.counts.copy(), time.perf_counter()
            image = stage.generate(str(index), ImageRequest(prompt, (picture,)))
            took, counts = time.perf_counter() - begun, stage.counts.since(before)
            print(
                f"{prompt!r}: {1000 * took:.0f} ms, {counts.computed_tokens} tokens computed, "
                f"{counts.hit_blocks * BLOCK_SIZE} prefix tokens from the node"
            )
            if node is not None:
                node.wait()
        if options.out:
            height, width, _ = image.pixels.shape
            options.out.write_bytes(b"P6 %d %d 255\n" % (width, height) + image.pixels.tobytes())


if __name__ == "__main__":
    main()
