"""``python -m stagecache``: the command line, where ``stagecache`` itself is not on the PATH."""

from stagecache.cli import main

if __name__ == "__main__":
    main()
