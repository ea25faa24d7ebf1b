"""Runs a program as this rank's child and notes how it ended. Arguments: folder, program, ...

The launcher sees only the witness, which outlives its child: so it takes no part in a rank's death
(MPICH's kills the survivors now and then even where it is told not to).
"""

import os
import subprocess
import sys
import time
from pathlib import Path

folder, *program = sys.argv[1:]
rank, size = os.environ["PMI_RANK"], int(os.environ["PMI_SIZE"])
child = subprocess.Popen([sys.executable, *program], close_fds=False)
status = child.wait()
unseen = Path(folder, f"of-{rank}")  # until it is whole: when all are there the launcher ends all
unseen.write_text(str(status))
unseen.rename(Path(folder, f"status-{rank}"))
deadline = time.monotonic() + 8
while len(list(Path(folder).glob("status-*"))) < size and time.monotonic() < deadline:
    time.sleep(0.05)
sys.exit(max(status, 0))  # a rank that is left in MPI_Finalize is ended by the launcher
