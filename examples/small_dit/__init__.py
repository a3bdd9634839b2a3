"""A small diffusion transformer with random weights, to try and to test stagecache.diffusion with (CPU, float32).

It has what prefix caching of a DiT has to get right: text and reference images in one self-attention sequence with the
noisy target, several layers, causal text and bidirectional images, 2-D positions, a VAE that draws at random,
classifier-free guidance with two rows, a timestep in the target, and LoRA. It paints nothing anyone would hang up.

    python -m examples.small_dit --prompt "a red boat" --out boat.ppm
"""

from examples.small_dit.config import SmallDiTConfig
from examples.small_dit.hook import MODEL_NAME, SmallDiTHook
from examples.small_dit.lora import Lora
from examples.small_dit.model import SmallDiT, SmallImage
from examples.small_dit.request import ImageRequest

__all__ = ["MODEL_NAME", "ImageRequest", "Lora", "SmallDiT", "SmallDiTConfig", "SmallDiTHook", "SmallImage"]
