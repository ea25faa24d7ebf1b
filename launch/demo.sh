#!/usr/bin/env bash
# Runs the demonstration on this machine: bash launch/demo.sh [--ranks N] [--json]
# Needs Linux, Python 3.10 or later and a C++ compiler; the rest is installed into the checkout.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ranks=4
options=()
while (($#)); do
    case $1 in
        --ranks)
            ranks="${2:-}"
            shift
            ;;
        --ranks=*) ranks="${1#*=}" ;;
        *) options+=("$1") ;;
    esac
    shift || true
done
[[ $ranks =~ ^[1-9][0-9]*$ ]] || die "--ranks wants a number of ranks"

# shellcheck disable=SC2119 # no extras
prepare
# GPUs need CuPy too; an environment that has one keeps it.
if compgen -G '/dev/nvidia[0-9]*' >/dev/null && [[ ${MKERNEL_TARGET:-auto} != host ]] &&
    ! "$python" -c 'import cupy, cuda.bindings.driver' 2>/dev/null; then
    prepare "$("$python" -c 'from mkernel_cp.targets import cuda; print(f"cu{cuda.driver_series()}")')"
fi
if [[ " ${options[*]-} " =~ \ (-h|--help)\  ]]; then exec "$python" -m mkernel_cp demo --help; fi
words="$(launcher --ranks "$ranks")"
mapfile -t mpirun <<<"$words"
exec "${mpirun[@]}" -n "$ranks" "$python" -m mkernel_cp demo --ranks "$ranks" "${options[@]}"
