# shellcheck shell=bash
# Sourced by the scripts beside it. After `prepare [EXTRA...]`, $python runs this checkout's mkernel_cp with all
# that pyproject.toml asks for. Nothing outside the checkout is changed, but an active virtual environment is used.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
userbase="$root/.venv-user" # where a Python that can make no environment installs to

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}" # its threads spin while they wait, and ranks share the cores

say() { printf 'mkernel_cp: %s\n' "$*" >&2; }
die() {
    say "$@"
    exit 1
}

require_linux() {
    [[ $(uname -s) == Linux ]] || die "runs on Linux only; on macOS or Windows use a container, a virtual machine or WSL 2"
}

require_compiler() {
    local candidates=(c++ g++ clang++) cxx
    if [[ -n ${CXX:-} ]]; then candidates=("$CXX"); fi
    for cxx in "${candidates[@]}"; do
        # CXX may hold options too.
        # shellcheck disable=SC2086
        if $cxx -std=c++17 -fsyntax-only -x c++ - <<<'#include <atomic>' 2>/dev/null; then return; fi
    done
    die "needs a C++17 compiler: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora, RHEL), or set CXX"
}

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
series() { "$1" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null; }
isolated() { "$python" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; }

choose_python() {
    local candidates=(${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} "$venv/bin/python" python3 python3.1{4,3,2,1,0})
    if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
    for python in "${candidates[@]}"; do
        if recent "$python"; then
            python="$("$python" -c 'import sys; print(sys.executable)')" # absolute
            return
        fi
    done
    die "needs Python 3.10 or later${PYTHON:+, which PYTHON=$PYTHON is not}: install one, or set PYTHON to it"
}

# Prints each requirement of pyproject.toml, of the named extras too, that this Python does not meet.
missing() {
    "$python" - "$root" dependencies "$@" <<'END' || echo "a working Python"
import json
import pathlib
import re
import sys
import urllib.parse
from importlib import metadata

root = pathlib.Path(sys.argv[1])
text = (root / "pyproject.toml").read_text(encoding="utf-8")


def numbers(version):
    return [int(n) for n in re.findall(r"\d+", version.split("+")[0])]


for name in sys.argv[2:]:
    for line in re.search(rf"^{name} = \[$(.*?)^\]$", text, re.S | re.M)[1].split("\n"):
        found = re.search(r'"(([\w.-]+)[^"]*)"', line)
        if not found:
            continue
        try:
            have = numbers(metadata.version(found[2]))
        except metadata.PackageNotFoundError:
            print(found[1])
            continue
        if any((have < numbers(to)) != (sign == "<") for sign, to in re.findall(r"(>=|<)([\d.]+)", found[1])):
            print(found[1])

# A checkout that was moved or copied brings an environment that points to the old place.
if sys.prefix == str(root / ".venv"):
    try:
        place = json.loads(metadata.distribution("mkernel_cp").read_text("direct_url.json"))["url"]
    except (metadata.PackageNotFoundError, TypeError):
        place = ""
    if urllib.parse.unquote(place) != f"file://{root}":
        print("mkernel_cp")
END
}

launcher() { "$python" "$root/mkernel_cp/launcher.py" "$@"; }

# Whether two ranks run. Where only /dev/shm is too small, another MPI would not help.
starts() {
    local why status=0
    why="$(launcher --try 2>&1)" || status=$?
    if ((status == 3)); then die "${why#mkernel_cp: }"; fi
    return "$status"
}

make_environment() {
    # A cluster's own mpi4py is bound to its network: if it works, it stays.
    local site=()
    if starts; then site=(--system-site-packages); fi
    rm -rf "$venv"
    say "making the environment $venv"
    if "$python" -m venv "${site[@]}" "$venv" >/dev/null 2>&1; then
        python="$venv/bin/python"
        return
    fi
    rm -rf "$venv" # what venv leaves behind where ensurepip is missing
    if "$python" -m virtualenv -q "${site[@]}" "$venv" 2>/dev/null ||
        virtualenv -q -p "$python" "${site[@]}" "$venv" 2>/dev/null; then
        python="$venv/bin/python"
    elif "$python" -m pip --version >/dev/null 2>&1; then
        say "this Python has no venv: installing to $userbase instead"
        mkdir -p "$userbase"
        use_userbase
    else
        die "$python can make no environment: apt-get install python3-venv (Debian, Ubuntu), or install pip or virtualenv"
    fi
}

# mpi4py looks for an MPI library under the user base as it does in a virtual environment.
use_userbase() {
    export PYTHONUSERBASE="$userbase" PIP_USER=1 PIP_BREAK_SYSTEM_PACKAGES=1
    unset PYTHONNOUSERSITE
}

install() { # EXTRAS, with commas
    local what="$root${1:+[$1]}"
    say "installing mkernel_cp${1:+ with $1}"
    if "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m pip install --quiet --no-warn-script-location --editable "$what"
    elif command -v uv >/dev/null; then
        uv pip install --quiet --python "$python" --editable "$what"
    else
        die "$python has no pip: run $python -m ensurepip"
    fi || die "the installation failed (see above)"
}

prepare() { # EXTRA...
    require_linux
    require_compiler
    choose_python
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

    if [[ -d $userbase ]] && ! isolated; then use_userbase; fi
    # Our own environment has been tried when it was made.
    if [[ ${python%/*} == "$venv/bin" && -z $(missing "$@") ]] && launcher >/dev/null 2>&1; then return; fi
    if [[ -z $(missing "$@") ]] && starts; then return; fi

    if ! isolated && [[ -z ${PYTHONUSERBASE:-} ]]; then
        if [[ -x $venv/bin/python && $(series "$venv/bin/python") == "$(series "$python")" ]]; then
            python="$venv/bin/python"
        else
            make_environment
        fi
    fi
    local extras
    extras="$(IFS=, && echo "$*")"
    # With an MPI on the machine mpi4py may do without ours.
    if ! command -v mpiexec >/dev/null && ! launcher >/dev/null 2>&1; then extras="mpi${extras:+,$extras}"; fi
    install "$extras"
    if [[ $extras != mpi* ]] && ! starts; then install "mpi${extras:+,$extras}"; fi
    launcher --try >/dev/null || exit 1
}
