"""Compares our declarations of the verbs and EFA interfaces with those of a distribution.

python tests/verbs_abi.py [FOLDER with infiniband/verbs.h] fetches Debian's headers if none is
given. Exit code 1 if a size, an offset or a constant differs, or if there are no headers.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

OURS = Path(__file__).parents[1] / "mkernel_cp" / "transport" / "native" / "verbs.h"
PACKAGES = ("libibverbs-dev",)
_NOT_COMPARED = {"not_used_here", "aligned"}


def expressions(text):
    """Return the C++ expressions that the two headers must agree on."""
    text = re.sub(r"//.*", "", text.split("// --- end of what is compared")[0])
    found = []
    for body in re.findall(r"enum \w*\s*\{(.*?)\};", text, re.DOTALL):
        found += [f"long({name})" for name in re.findall(r"(\w+)(?:\s*=[^,]*)?(?:,|\s*$)", body)]
    for name, body in re.findall(
        r"^(?:struct|union) (\w+) \{\n(.*?)^\};", text, re.DOTALL | re.MULTILINE
    ):
        found.append(f"sizeof({name})")
        for group, member in re.findall(r"struct \{(.*?)\} (\w+);", body, re.DOTALL):
            found += [
                f"offsetof({name}, wr.{member}.{field})" for field in re.findall(r"(\w+);", group)
            ]
        flat = re.sub(r"struct \{.*?\} \w+;", "", body, flags=re.DOTALL)
        members = re.findall(r"\(\*(\w+)\)|(\w+)(?:\[\w+\])?;", flat)
        names = {pointer or plain for pointer, plain in members} - _NOT_COMPARED
        found += [f"offsetof({name}, {field})" for field in sorted(names)]
        found += [f"sizeof({name}::{field})" for field in sorted(names)]
    return found


def values(include, folders, wanted):
    """Return what each expression is where a header is included."""
    lines = "\n".join(f'std::printf("%s=%ld\\n", "{e}", long({e}));' for e in wanted)
    source = f"#include <cstdio>\n#include <cstddef>\n{include}\nint main() {{\n{lines}\n}}\n"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program")
        Path(folder, "program.cpp").write_text(source)
        command = [os.environ.get("CXX", "c++"), "-std=c++17", "-w", "-Wno-invalid-offsetof"]
        command += [*(f"-I{place}" for place in folders), f"{program}.cpp", "-o", str(program)]
        subprocess.run(command, check=True)
        output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return dict(line.rsplit("=", 1) for line in output.splitlines())


def compare(folder):
    """Return what differs from the headers in a folder, and how much was compared."""
    wanted = expressions(OURS.read_text())
    ours = values(f'#include "{OURS}"', [], wanted)
    real = "#include <infiniband/verbs.h>\n#include <infiniband/efadv.h>"
    theirs = values(real, [folder], wanted)
    different = [f"{e}: ours {ours[e]}, theirs {theirs[e]}" for e in wanted if ours[e] != theirs[e]]
    return different, len(wanted)


def fetch(folder):
    """Return the include folder of the distribution's packages, unpacked and not installed."""
    download = ["apt-get", "-qq", "download", *PACKAGES]
    if subprocess.run(download, cwd=folder).returncode:
        subprocess.run(["apt-get", "-qq", "update"], check=True)
        subprocess.run(download, cwd=folder, check=True)
    for file in Path(folder).glob("*.deb"):
        subprocess.run(["dpkg", "-x", file, folder], check=True)
    return Path(folder, "usr", "include")


def main():
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)  # apt downloads as another user
        different, compared = compare(sys.argv[1] if len(sys.argv) > 1 else fetch(scratch))
    print(*different, f"{compared} sizes, offsets and constants compared", sep="\n")
    raise SystemExit(bool(different))


if __name__ == "__main__":
    main()
