"""Programs of several ranks, for tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mkernel_cp.launcher import find_launcher

ROOT = Path(__file__).resolve().parents[1]


def mpirun(
    n: int,
    *args: str | Path,
    timeout: float = 240,
    env: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run ``python *args`` on n ranks; `env` is added to the environment, `flags` to the launcher.

    The exit code is not checked. On a time-out the ranks are ended, and subprocess.TimeoutExpired
    has their output.
    """
    environ = {**os.environ, **(env or {})}
    path = [str(ROOT), str(ROOT / "tests"), environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    before = _segments()
    command = [*find_launcher(n), *flags, "-n", str(n), sys.executable, *map(str, args)]
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
            _remove(_segments() - before)
            if isinstance(error, subprocess.TimeoutExpired):
                raise subprocess.TimeoutExpired(command, timeout, out, err) from None
            raise
    if process.returncode:
        _remove(_segments() - before)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _segments() -> set[Path]:
    return set(Path("/dev/shm").glob("mpich_shm_*"))


def _remove(segments: set[Path]) -> None:
    """Remove what MPICH leaves behind when its ranks are killed; a small /dev/shm would fill up."""
    maps = []
    for file in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            maps.append(file.read_text(errors="replace"))
    for segment in segments:
        if not any(segment.name in text for text in maps):  # else another job's
            with contextlib.suppress(OSError):
                segment.unlink()
