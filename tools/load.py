"""Steady load for an OpenAI-compatible server: conversations that share a system prompt, turn after turn.

    python tools/load.py --url http://127.0.0.1:8000 --seconds 300

Each turn sends the whole conversation so far, so most of its prompt hits the engine's prefix cache. Prompts are token
ids, since hits need no meaning. Status 1 when a request failed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import urllib.request
from typing import Any

SYSTEM_TOKENS = 256
TURNS = 5
ANSWER_TOKENS = 24
FIRST_TOKEN, LAST_TOKEN = 3, 1900
"""Ids that every small vocabulary has, without special ones."""


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """The answer to a GET, or to a POST of a body, as JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


class Load:
    """What all talkers share."""

    def __init__(self, url: str, until: float) -> None:
        self.url, self.until = url.rstrip("/"), until
        self.model: str = call(f"{self.url}/v1/models")["data"][0]["id"]
        self.answered = 0
        self.failed = 0

    def talk(self, seed: int) -> None:
        """One conversation after another, until the time is over."""
        own = random.Random(seed)
        while time.monotonic() < self.until:
            tokens = _tokens(random.Random(0), SYSTEM_TOKENS)
            for _ in range(TURNS):
                tokens += _tokens(own, own.randrange(60, 160))
                if time.monotonic() < self.until:
                    self._ask(tokens)
                    time.sleep(own.random() * 0.4)

    def _ask(self, tokens: list[int]) -> None:
        body = {"model": self.model, "prompt": tokens, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        try:
            call(f"{self.url}/v1/completions", body)
            self.answered += 1
        except OSError as error:
            self.failed += 1
            print(f"failed: {error}", file=sys.stderr)


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def main() -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--talkers", type=int, default=4, help="conversations at once (default 4)")
    chosen = parser.parse_args()
    try:
        load = Load(chosen.url, time.monotonic() + chosen.seconds)
    except OSError as error:
        print(f"{chosen.url} does not answer: {error}", file=sys.stderr)
        return 1
    talkers = [threading.Thread(target=load.talk, args=(seed,)) for seed in range(1, chosen.talkers + 1)]
    for talker in talkers:
        talker.start()
    for talker in talkers:
        talker.join()
    print(f"{load.answered} answers, {load.failed} failed")
    return 1 if load.failed else 0


if __name__ == "__main__":
    sys.exit(main())
