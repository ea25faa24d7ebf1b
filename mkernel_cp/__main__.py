"""``python -m mkernel_cp``."""

import sys

from .cli import main

sys.exit(main())
