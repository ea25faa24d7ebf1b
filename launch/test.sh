#!/usr/bin/env bash
# Lints, then runs the tests: bash launch/test.sh [PYTEST ARGUMENTS]. They need no GPU.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare test
launcher --ranks 4 >/dev/null # the largest world that the tests start
cd "$root"
"$python" -m ruff check mkernel_cp tests launch
# By a process for each core, to a limit: each starts up to 4 ranks. `-n 0`: by one only, as a debugger needs.
exec "$python" -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"
