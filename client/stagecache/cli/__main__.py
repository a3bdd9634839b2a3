"""``python -m stagecache.cli``: the ``stagecache`` command."""

from stagecache.cli import main

main()
