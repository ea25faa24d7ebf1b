#!/usr/bin/env bash
# Runs the tests of the network on real cards of this host: bash launch/test_fabric.sh [CARD[,CARD]] [PYTEST ARGUMENTS]
# Without CARD, on those that are nearest. What faults, counters and two transports need stays with cards of software.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cards=
if [[ ${1:-} != "" && $1 != -* ]]; then
    cards="$1"
    shift
fi
prepare test
cd "$root"
if [[ -z $cards ]]; then
    cards="$("$python" - <<'END'
from mkernel_cp.transport import devices

print(",".join(devices.choose(devices.ports(), [devices.of_process()])[0]))
END
    )"
fi
[[ -n $cards ]] || die "no network card with an active port: $python -m mkernel_cp doctor shows what there is"
say "network cards $cards"
"$python" -m pytest -q -p no:cacheprovider --nic "$cards" tests/test_network.py tests/test_nodes.py "$@"
say "between hosts: bash launch/mpirun_hosts.sh HOSTFILE RANKS_PER_HOST"
