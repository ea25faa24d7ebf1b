#!/usr/bin/env bash
# Runs the demonstration on this machine: bash launch/demo.sh [--ranks N] [--json]
# Without --ranks 4 ranks, or one for each GPU, if there are fewer than 4; with more than GPUs, they share them.
# Needs Linux, Python 3.10 or later and a C++ compiler; the rest is installed into the checkout.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ranks=
options=()
while (($#)); do
    case $1 in
        --ranks)
            ranks="${2:-none}"
            shift
            ;;
        --ranks=*) ranks="${1#*=}" ;;
        -h | --help)
            sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}"
            exit
            ;;
        *) options+=("$1") ;;
    esac
    shift || true
done
[[ -z $ranks || $ranks =~ ^[1-9][0-9]*$ ]] || die "--ranks wants a number of ranks"

# shellcheck disable=SC2119 # no extras
prepare
most=4
if compgen -G '/dev/nvidia[0-9]*' >/dev/null && [[ ${MKERNEL_TARGET:-auto} != host ]]; then
    # GPUs need CuPy too; an environment that has one keeps it.
    if ! "$python" -c 'import cupy, cuda.bindings.driver' 2>/dev/null; then
        prepare "$("$python" -c 'from mkernel_cp.targets import cuda; print(f"cu{cuda.driver_series()}")')"
    fi
    # What is wrong with them the ranks tell.
    gpus="$("$python" -c 'from mkernel_cp.targets import cuda; print(len(cuda.describe()))' 2>/dev/null || echo 1)"
    most=$((gpus < most ? gpus : most))
fi
ranks="${ranks:-$most}"
words="$(launcher --ranks "$ranks")"
mapfile -t mpirun <<<"$words"
exec "${mpirun[@]}" -n "$ranks" "$python" -m mkernel_cp demo --ranks "$ranks" "${options[@]}"
