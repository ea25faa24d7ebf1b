#!/usr/bin/env bash
# Runs the shared tests of the operators on this host's GPUs: bash launch/test_gpu.sh [--ranks R | --one-gpu] [--junit FOLDER]
# Without --ranks the worlds of 1, 2, 3 and 4 ranks, one after the other. With fewer GPUs than ranks, ranks share them.
# With --one-gpu all these ranks are threads of one process on one GPU: quicker there, and without MPI.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

worlds=(1 2 3 4)
junit="$root/.test_gpu"
one_gpu=
while (($#)); do
    case "$1" in
        --ranks) worlds=("$2") && shift ;;
        --junit) junit="$2" && shift ;;
        --one-gpu) one_gpu=1 ;;
        *) die "unknown argument $1: use --ranks R, --one-gpu, --junit FOLDER" ;;
    esac
    shift
done
prepare test
mkdir -p "$junit"
junit="$(cd "$junit" && pwd -P)"
cd "$root"

if [[ $one_gpu ]]; then
    exec timeout -k 10 900 "$python" -m pytest -q -p no:cacheprovider --one-gpu tests --junitxml "$junit/one_gpu.xml"
fi
failed=0
for ranks in "${worlds[@]}"; do
    mapfile -t launch < <(launcher --ranks "$ranks")
    say "$ranks rank(s) on GPUs"
    # shellcheck disable=SC2016 # the ranks expand it
    # Every rank runs the tests; each writes its own report, and all of them have to pass.
    timeout -k 10 480 "${launch[@]}" -n "$ranks" bash -c '
        rank="${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${SLURM_PROCID:-0}}}}"
        report="$1/world_$2_rank_$rank"
        shift 2
        exec "$@" --junitxml "$report.xml" >"$report.txt" 2>&1
    ' run "$junit" "$ranks" "$python" -m pytest -q -p no:cacheprovider --gpu tests || failed=1
    tail -n 3 "$junit/world_${ranks}_rank_0.txt" || true
done
if [[ "$(launcher)" == *hydra* ]]; then
    say "ranks that are killed, stop or leave"
    timeout -k 10 300 "$python" -m pytest -q -p no:cacheprovider --target cuda tests/test_processes.py \
        -k "not rounds" --junitxml "$junit/processes.xml" || failed=1
else
    say "ranks that are killed were not tested: that needs MPICH, as other launchers end the survivors"
fi
((failed)) && say "failed: see $junit"
exit "$failed"
