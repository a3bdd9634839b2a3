"""A daemon without one of its checks, the control of the call fuzz: key schemas are taken as they come.

python -m tests.fuzz.careless --socket PATH
"""

from __future__ import annotations

import sys

from stagecache_wire.geometry import KeySchema
from stagecache_wire.messages import schema_from_wire
from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecached import convert, main


def taken_as_it_comes(key: pb.KeySchema) -> KeySchema:
    """In the place of ``convert.checked_schema``."""
    return schema_from_wire(key)


if __name__ == "__main__":
    convert.checked_schema = taken_as_it_comes
    sys.exit(main.main())
