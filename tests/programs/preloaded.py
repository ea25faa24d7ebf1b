"""Runs a program with a library loaded first, which the launcher itself must not load.

Arguments: library, program, ...
"""

import os
import sys

library, *program = sys.argv[1:]
os.execve(sys.executable, [sys.executable, *program], {**os.environ, "LD_PRELOAD": library})
