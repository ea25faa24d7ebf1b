"""Programs of several ranks, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mkernel_cp.launcher import find_launcher

ROOT = Path(__file__).resolve().parents[1]


def mpirun(
    n: int, *args: str | Path, timeout: float = 120, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python *args`` on n ranks; `env` is added to the environment.

    The exit code is not checked. On a time-out the ranks are ended, and subprocess.TimeoutExpired
    has their output.
    """
    environ = {**os.environ, **(env or {})}
    path = [str(ROOT), str(ROOT / "tests"), environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [*find_launcher(n), "-n", str(n), sys.executable, *map(str, args)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            process.terminate()  # a launcher that is asked to end takes its ranks along
            try:
                out, err = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise subprocess.TimeoutExpired(command, timeout, out, err) from None
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
