"""Equal token ids, other contents: vLLM's real requests and scheduler, its own block hashes, our shim, a real daemon.

What one request publishes another is given where it is the same content, and never where an image, a salt or an
adapter differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine: make venv")

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request, RequestStatus

from stagecache.shim.block_leases import BlockLeases
from stagecache.shim.scheduler import install
from stagecache.shim.shared_blocks import SharedBlocks
from stagecache_wire.v1 import stagecache_pb2 as pb
from tests.integration.helpers import own_daemon
from tests.integration.sharing_worker import SharingWorker
from tests.unit.shim.kv_elsewhere import Elsewhere, ElsewhereConnector
from tests.unit.shim.scheduler_kit import BLOCK, make_model_config, make_scheduler

pytestmark = pytest.mark.engine

IMAGE = 999
"""The token that stands for a part of any image."""
TOKENS = [*range(100, 120), *[IMAGE] * 40, *range(200, 240)]
WHOLE = len(TOKENS) // BLOCK * BLOCK


class Everything:
    """Hashes of which KV is there: all."""

    def __contains__(self, block_hash: bytes) -> bool:
        return True


class Engine:
    """A scheduler whose connector offers KV of every block, whatever it holds: only the daemon tells contents apart."""

    def __init__(self, model_config: Any, socket: Path) -> None:
        ElsewhereConnector.elsewhere = Elsewhere()
        ElsewhereConnector.elsewhere.hashes = Everything()  # type: ignore[assignment]
        transfer = KVTransferConfig(
            kv_connector="ElsewhereConnector", kv_role="kv_both", kv_connector_module_path=ElsewhereConnector.__module__
        )
        self.scheduler = make_scheduler(model_config, kv_transfer_config=transfer)
        self.scheduler.max_num_encoder_input_tokens = 128
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=128)
        self.leases = BlockLeases(str(socket), "s", "e")
        install(self.scheduler, shared=SharedBlocks(self.leases, BLOCK))

    def schedule(self, asked: Request) -> tuple[int, list[tuple[int, bytes]]]:
        """Tokens of a request that need not be computed, and the blocks that its first step publishes."""
        name = asked.request_id
        self.scheduler.add_request(asked)
        output = self.scheduler.schedule()
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.scheduler.schedule()  # That it has ended is told with one more step.
        return output.scheduled_new_reqs[0].num_computed_tokens, output.stagecache_published.get(name, [])


class Stage:
    """Two engines of one stage, and the worker of theirs that has joined."""

    def __init__(self, model_config: Any, socket: Path) -> None:
        self.worker = SharingWorker(socket, stage="s", engine="e")
        assert self.worker.join(hash_algorithm="sha256").on
        self.one, self.other = (Engine(model_config, socket) for _ in range(2))

    def publish(self, named: list[tuple[int, bytes]]) -> list[int]:
        raw, ids = b"".join(block_hash for _, block_hash in named), list(range(len(named)))
        return self.worker.publish(ids, raw, self.worker.save(ids, raw))

    def close(self) -> None:
        for engine in (self.one, self.other):
            engine.leases.close()
        self.worker.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with own_daemon(tmp_path_factory.mktemp("d"), "--shared-bytes", "1MiB") as daemon:
        made = Stage(make_model_config(tmp_path_factory.mktemp("model")), daemon.socket)
        yield made
        made.close()


def image(identifier: str, offset: int = 20, length: int = 24) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
        mm_hash=identifier,
    )


IMAGES = {
    "none": [],
    "cat": [image("cat")],
    "dog": [image("dog")],
    "cat, one token later": [image("cat", 21)],
    "cat and dog": [image("cat"), image("dog", 46, 10)],
    "cat and cat": [image("cat"), image("cat", 46, 10)],
}
CASES = [
    ("images", "none", "cat", 1),
    ("images", "cat", "none", 1),
    ("images", "cat", "dog", 1),
    ("images", "cat", "cat, one token later", 1),
    ("images", "cat and dog", "cat and cat", 2),
    ("images", "cat", "cat and cat", 2),
    ("salt", "", "x", 0),
    ("salt", "x", "", 0),
    ("salt", "x", "y", 0),
    ("adapter", "", "a", 0),
    ("adapter", "a", "", 0),
    ("adapter", "a", "b", 0),
]
"""What differs; what is published, and asked for; blocks in front of the difference, which are equal and shared."""


def request(name: str, case: int, kind: str, content: str, folder: Path) -> Request:
    """The same tokens for all requests of a case. Adapters have one name, as two engines may give it."""
    params = SamplingParams(ignore_eos=True, max_tokens=2)
    params.update_from_generation_config({}, 2)
    adapted = kind == "adapter" and content
    return Request(
        request_id=f"{name} {case}",
        prompt_token_ids=[case, *TOKENS[1:]],
        sampling_params=params,
        pooling_params=None,
        mm_features=list(IMAGES[content]) if kind == "images" else [],
        lora_request=LoRARequest("style", 1, str(folder / content)) if adapted else None,
        cache_salt=content or None if kind == "salt" else None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


@pytest.mark.parametrize(("case", "kind", "published", "asked", "equal"), [(n, *c) for n, c in enumerate(CASES)])
def test_another_content_of_equal_tokens_is_never_shared_and_the_same_is(
    stage: Stage, tmp_path: Path, case: int, kind: str, published: str, asked: str, equal: int
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
    hit, named = stage.one.schedule(request("one", case, kind, published, tmp_path))
    assert (hit, len(named)) == (0, WHOLE // BLOCK)
    assert stage.publish(named) == [pb.PUBLISH_STATE_STORED] * len(named)
    assert stage.other.schedule(request("other", case, kind, asked, tmp_path))[0] == equal * BLOCK
    assert stage.other.schedule(request("same", case, kind, published, tmp_path))[0] == WHOLE
