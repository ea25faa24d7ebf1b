#!/usr/bin/env bash
# The demonstration, or a program, on several hosts: bash launch/mpirun_hosts.sh HOSTFILE RANKS_PER_HOST [PROGRAM [ARGUMENTS]]
# HOSTFILE has a host per line; all of them see this checkout at the same path. InfiniBand, RoCE and EFA alike: each rank
# takes the network cards that are nearest to it, and MKERNEL_TRANSPORT and MKERNEL_NICS choose others.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ $# -ge 2 && -r $1 && $2 =~ ^[1-9][0-9]*$ ]] || die "usage: mpirun_hosts.sh HOSTFILE RANKS_PER_HOST [PROGRAM [ARGUMENTS]]"
hostfile="$1" each="$2"
shift 2
# shellcheck disable=SC2119 # no extras
prepare
# Network cards lock the memory that they read and write.
[[ $(ulimit -l) == unlimited ]] || say "ulimit -l is $(ulimit -l) KiB: registrations of memory may fail"

export PATH="${python%/*}:$PATH" # the launcher of an MPI that is installed there
ranks="$(($(grep -c '[^[:space:]]' "$hostfile") * each))"
mapfile -t names < <(compgen -e | grep '^MKERNEL_' || true)
# This MPI carries the set-up only, so TCP is enough for it where it does not know the network.
if mpirun --version | grep -q 'Open MPI'; then
    command=(mpirun --hostfile "$hostfile" --map-by "ppr:$each:node" --bind-to none -x PYTHONPATH)
    for name in "${names[@]}"; do command+=(-x "$name"); done
else
    command=(mpirun -f "$hostfile" -ppn "$each" -genvall)
fi
"${command[@]}" -n "$ranks" "$python" -m mkernel_cp doctor
if (($#)); then exec "${command[@]}" -n "$ranks" "$python" "$@"; fi
exec "${command[@]}" -n "$ranks" "$python" -m mkernel_cp demo
