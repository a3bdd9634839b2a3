"""``python -m stagecached`` is ``stagecached``."""

import sys

from stagecached.main import main

sys.exit(main())
