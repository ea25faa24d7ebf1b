"""The structs that Python fills in are those that a C++ compiler makes of the same text."""

import ctypes
import re
from pathlib import Path

import pytest

from mkernel_cp import compiler, structs

KINDS = {
    "shared": (structs.shared, "types.cuh", "mk"),
    "host": (structs.host, "host_runtime.cuh", "mk::host"),
}
EXPORT = 'extern "C" __attribute__((visibility("default")))'


def section(header):
    text = (Path(compiler.include_dir()) / "mkernel" / header).read_text()
    begin = text.index("structs shared with Python")
    return text[begin : text.index("end of the shared structs", begin)]


def mirrors(kind):
    """The ctypes classes of a kind, by name."""
    return vars(KINDS[kind][0]())


def leaves(struct):
    """Yield (offset, bytes) of every word and array of words, nested structs taken apart."""
    for name, ctype in struct._fields_:
        offset = getattr(struct, name).offset
        if issubclass(ctype, ctypes.Structure):
            yield from ((offset + inner, size) for inner, size in leaves(ctype))
        else:
            yield offset, ctypes.sizeof(ctype)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, kernels):
    """What the compiler says of a struct: bytes, alignment, {member: (offset, bytes)}."""
    lines = ["#include <cstddef>"]
    lines += [f"#include <mkernel/{header}>" for header in ("types.cuh", "host_runtime.cuh")]
    for kind, (_, _, scope) in KINDS.items():
        for struct, mirror in mirrors(kind).items():
            name = f"{scope}::{struct}"
            facts = [f"sizeof({name})", f"alignof({name})"]
            for member, _ in mirror._fields_:
                facts += [f"offsetof({name}, {member})", f"sizeof({name}::{member})"]
            lines.append(
                f"{EXPORT} const unsigned long long* {kind}_{struct}() {{\n"
                f"    static const unsigned long long facts[] = {{{', '.join(facts)}}};\n"
                "    return facts;\n}"
            )
    source = tmp_path_factory.mktemp("structs") / "structs_shared_with_python.cpp"
    source.write_text("\n".join(lines) + "\n")
    library = compiler.host_library(source)

    def ask(kind, struct):
        function = getattr(library, f"{kind}_{struct}")
        function.restype = ctypes.POINTER(ctypes.c_uint64)
        facts = function()
        members = [member for member, _ in mirrors(kind)[struct]._fields_]
        pairs = {name: (facts[2 + 2 * i], facts[3 + 2 * i]) for i, name in enumerate(members)}
        return facts[0], facts[1], pairs

    return ask


@pytest.mark.parametrize("kind", KINDS)
def test_every_struct_of_the_section_is_mirrored(kind):
    text = re.sub(r"//.*", "", section(KINDS[kind][1]))
    names = re.findall(r"\bstruct\s+(?:alignas\(\d+\)\s+)?(\w+)\s*\{", text)
    assert names
    assert list(mirrors(kind)) == names


@pytest.mark.parametrize("kind", KINDS)
def test_every_member_is_mirrored(kind):
    """Not even one at an end, which would change no offset of another."""
    text = re.sub(r"//.*", "", section(KINDS[kind][1]))
    for struct, mirror in mirrors(kind).items():
        pattern = rf"\bstruct\s+(?:alignas\(\d+\)\s+)?{struct}\s*\{{(.*?)\}}"
        body = re.search(pattern, text, re.DOTALL).group(1)
        declared = [part.split("[")[0].split()[-1].lstrip("*") for part in body.split(";")[:-1]]
        assert [name for name, _ in mirror._fields_] == declared, struct


@pytest.mark.parametrize(
    ("kind", "struct"), [(kind, struct) for kind in KINDS for struct in mirrors(kind)]
)
def test_sizes_and_offsets_are_the_compilers(compiled, kind, struct):
    mirror = mirrors(kind)[struct]
    size, alignment, members = compiled(kind, struct)
    here = {
        name: (getattr(mirror, name).offset, getattr(mirror, name).size)
        for name, _ in mirror._fields_
    }
    assert here == members
    assert ctypes.sizeof(mirror) == size
    assert ctypes.alignment(mirror) == 8
    # What ctypes cannot align better, such as a tensor map, has places that need no padding.
    assert alignment in (8, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_members_are_words_without_gaps(kind):
    for struct, mirror in mirrors(kind).items():
        end = 0
        for offset, size in leaves(mirror):
            assert offset == end, struct
            assert size
            assert size % 8 == 0, struct
            end += size
        assert end == ctypes.sizeof(mirror), struct


def test_one_class_per_struct():
    """ctypes takes two classes of one name for different types."""
    assert structs.shared() is structs.shared()
    assert structs.host() is structs.host()
    nested = dict(structs.shared().AllGatherGemmParams._fields_)["message"]
    assert nested is structs.shared().CallMessage
