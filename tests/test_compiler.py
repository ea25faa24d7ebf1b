"""The compiler's cache: what makes an entry new, and that only whole entries are ever read."""

import contextlib
import errno
import fcntl
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import worlds

from mkernel_cp import compiler
from mkernel_cp.errors import CompileError, ConfigurationError

PACKAGE = Path(compiler.__file__).resolve().parent
EXPORT = 'extern "C" __attribute__((visibility("default"))) '


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("MKERNEL_CACHE_DIR", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    # Tests share their sources, and one is not to get what another has loaded.
    monkeypatch.setattr(compiler, "_libraries", {})
    return folder


@pytest.fixture
def folder_of_kernels(tmp_path):
    """A kernels folder of one source, whose value comes from a header of a header."""
    folder = tmp_path / "kernels"
    (folder / "include" / "mkernel").mkdir(parents=True)
    (folder / "sample.cu").write_text(
        "#include <cstdint>\n#include <mkernel/outer.cuh>\n"
        + EXPORT
        + "int value() { return VALUE; }\n"
    )
    (folder / "include" / "mkernel" / "outer.cuh").write_text(
        '#pragma once\n#include "inner.cuh"\n#include <mkernel/outer.cuh>\n'
    )
    (folder / "include" / "mkernel" / "inner.cuh").write_text("#define VALUE 1\n")
    with compiler.using_kernels(folder):
        yield folder


def write_source(path, body="int value() { return 42; }"):
    path.write_text(EXPORT + body + "\n")
    return path


def compiles(action):
    """Return what the action returned, and how many compilations it took."""
    before = compiler.compile_count()
    result = action()
    return result, compiler.compile_count() - before


def write_wrapper(tmp_path, body, *, name="wrapper", version=None):
    """A C++ compiler that does something of its own before it compiles."""
    real = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    wrapper = tmp_path / name
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) {version or real + " --version"}; exit;; esac\n'
        f'{body}\nexec {real} "$@"\n'
    )
    wrapper.chmod(0o755)
    return wrapper


def start(script, *arguments, environment=None, **options):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), **(environment or {})},
        text=True,
        **options,
    )


def test_compiles_loads_and_keeps(tmp_path, cache):
    source = write_source(tmp_path / "sample.cpp", "int value() { return VALUE + FLAG; }")
    defines = {"VALUE": 40, "FLAG": True}
    library, count = compiles(lambda: compiler.host_library(source, defines=defines))
    assert library.value() == 41
    assert count == 1
    again, count = compiles(lambda: compiler.host_library(source, defines=defines))
    assert again is library
    assert count == 0
    assert compiler.host_library(source, defines={**defines, "VALUE": "7"}).value() == 8
    assert len(list(cache.iterdir())) == 2


def test_a_second_process_compiles_nothing(tmp_path):
    source = write_source(tmp_path / "sample.cpp")
    script = (
        "import sys; from mkernel_cp import compiler\n"
        "print(compiler.host_library(sys.argv[1]).value(), compiler.compile_count())"
    )
    outputs = []
    for _ in range(2):
        process = start(script, source, stdout=subprocess.PIPE)
        outputs.append(process.communicate(timeout=60)[0].split())
    assert outputs == [["42", "1"], ["42", "0"]]


@pytest.mark.parametrize("header", ["outer.cuh", "inner.cuh"])
def test_an_edited_header_compiles_again(folder_of_kernels, header):
    source = compiler.kernel_source("sample")
    assert compiler.host_library(source).value() == 1
    path = folder_of_kernels / "include" / "mkernel" / header
    path.write_text(path.read_text() + "#undef VALUE\n#define VALUE 2\n")
    library, count = compiles(lambda: compiler.host_library(source))
    assert library.value() == 2
    assert count == 1


def test_only_what_has_changed_is_read_again(folder_of_kernels, monkeypatch):
    source, headers = compiler.kernel_source("sample"), folder_of_kernels / "include"
    read = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or read_bytes(path))

    def texts():
        read.clear()
        return len(compiler._texts(source, [compiler.include_dir()])), len(read)

    # What was written a moment ago may change once more without a sign of it.
    assert [texts(), texts()] == [(3, 3)] * 2
    monkeypatch.setattr(compiler, "_SETTLED_NS", 0)
    assert [texts(), texts()] == [(3, 3), (3, 0)]
    (headers / "mkernel" / "inner.cuh").write_text("#define VALUE 2\n")  # of the same length
    assert [texts(), texts()] == [(3, 3), (3, 0)]
    (headers / "cstdint").write_text("// found before the system's\n")
    assert [texts(), texts()] == [(4, 4), (4, 0)]
    (headers / "alias.cuh").symlink_to(headers / "mkernel" / "inner.cuh")
    (headers / "cstdint").write_text('#include "alias.cuh"\n')
    assert [texts(), texts()] == [(4, 4), (4, 0)]  # it is one header, by any name
    (headers / "alias.cuh").unlink()
    (headers / "alias.cuh").write_text("#define OTHER 1\n")
    assert [texts(), texts()] == [(5, 5), (5, 0)]


def test_neither_place_nor_time_is_in_the_key(folder_of_kernels, tmp_path):
    path = compiler.host_library_path(compiler.kernel_source("sample"))
    moved = tmp_path / "elsewhere" / "kernels"
    shutil.copytree(folder_of_kernels, moved)
    for file in moved.rglob("*"):
        os.utime(file, (1, 1))
    with compiler.using_kernels(moved):
        source = compiler.kernel_source("sample")
        assert source.parent == moved
        assert compiles(lambda: compiler.host_library_path(source)) == (path, 0)


def test_options_and_compiler_are_in_the_key(tmp_path, monkeypatch):
    source = write_source(tmp_path / "sample.cpp")
    paths = [
        compiler.host_library_path(source),
        compiler.host_library_path(source, defines={"VALUE": 1}),
        compiler.host_library_path(source, sanitize="undefined"),
    ]
    wrapper = write_wrapper(tmp_path, "")
    monkeypatch.setenv("CXX", str(wrapper))
    assert compiler.host_library_path(source) == paths[0]
    monkeypatch.setenv("CXX", f"{wrapper} -DOTHER")
    paths.append(compiler.host_library_path(source))
    newer = write_wrapper(tmp_path, "", name="newer", version="echo version 99")
    monkeypatch.setenv("CXX", str(newer))
    paths.append(compiler.host_library_path(source))
    assert len(set(paths)) == 5


def test_an_unused_include_folder_is_not_in_the_key(tmp_path):
    source = write_source(tmp_path / "sample.cpp")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "unused.h").write_text("")
    path = compiler.host_library_path(source)
    extra = [tmp_path / "include"]
    assert compiler.host_library_path(source, extra_include=extra) == path


def test_an_extra_include_folder_is_searched_and_its_text_is_in_the_key(tmp_path):
    source = tmp_path / "sample.cpp"
    source.write_text(f'#include "extra.h"\n{EXPORT}int value() {{ return VALUE; }}\n')
    header = tmp_path / "include" / "extra.h"
    header.parent.mkdir()
    for value in (5, 6):
        header.write_text(f"#define VALUE {value}\n")
        library = compiler.host_library(source, extra_include=[header.parent])
        assert library.value() == value


def test_an_include_through_a_macro_is_refused(tmp_path):
    source = tmp_path / "sample.cpp"
    source.write_text("#define HEADER <cstdint>\n#include HEADER\n")
    with pytest.raises(CompileError, match="#include HEADER"):
        compiler.host_library_path(source)


def flip_a_byte(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda _: b"",
        flip_a_byte,
    ],
    ids=["last byte lost", "half lost", "empty", "one bit"],
)
def test_a_damaged_entry_compiles_again(tmp_path, damage):
    source = write_source(tmp_path / "sample.cpp")
    path = compiler.host_library_path(source)
    path.write_bytes(damage(path.read_bytes()))
    again, count = compiles(lambda: compiler.host_library_path(source))
    assert (again, count) == (path, 1)
    assert compiles(lambda: compiler.host_library_path(source)) == (path, 0)


def test_many_processes_at_once_compile_once(tmp_path, cache):
    source = write_source(tmp_path / "sample.cpp")
    log = tmp_path / "log"
    wrapper = write_wrapper(tmp_path, f"echo compiled >> {shlex.quote(str(log))}; sleep 0.3")
    script = (
        "import sys; from mkernel_cp import compiler\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(compiler.host_library(sys.argv[1]).value(), compiler.compile_count())"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [
        start(script, source, environment={"CXX": str(wrapper)}, **pipes) for _ in range(16)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert sorted(outputs) == [["42", "0"]] * 15 + [["42", "1"]]
    assert log.read_text() == "compiled\n"
    assert len(list(cache.iterdir())) == 1


def test_waiting_can_be_interrupted_and_ends_when_the_holder_dies(tmp_path, cache):
    source = write_source(tmp_path / "sample.cpp")
    started, gate = tmp_path / "started", tmp_path / "gate"
    body = f"touch {shlex.quote(str(started))}; test -e {shlex.quote(str(gate))} || sleep 60"
    environment = {"CXX": str(write_wrapper(tmp_path, body))}
    script = (
        "import logging, signal, sys; from mkernel_cp import compiler\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs may ignore it\n"
        "logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "print(compiler.host_library(sys.argv[1]).value())"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    holder = start(script, source, environment=environment, start_new_session=True, **pipes)
    try:
        assert worlds.until(started.exists, 20)
        waiters = [start(script, source, environment=environment, **pipes) for _ in range(2)]
        for waiter in waiters:
            assert "waiting for another process to compile sample" in waiter.stderr.readline()
        waiters[0].send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in waiters[0].communicate(timeout=20)[1]
        assert waiters[1].poll() is None
        gate.touch()
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.communicate()
    assert waiters[1].communicate(timeout=20)[0] == "42\n"
    assert len(list(cache.iterdir())) == 1


def test_a_holder_that_hangs_is_not_waited_for_without_end(tmp_path, cache, monkeypatch, caplog):
    source = write_source(tmp_path / "sample.cpp")
    entry = compiler.host_library_path(source)
    entry.unlink()
    monkeypatch.setattr(compiler, "_PATIENCE_SECONDS", 0.2)
    with open(cache / f".{entry.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert compiles(lambda: compiler.host_library_path(source)) == (entry, 1)
    assert "not waiting" in caplog.text


def test_many_threads_at_once_compile_once(tmp_path):
    source = write_source(tmp_path / "sample.cpp")
    barrier = threading.Barrier(8)
    libraries = []

    def load():
        barrier.wait()
        libraries.append(compiler.host_library(source))

    def load_in_threads():
        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    _, count = compiles(load_in_threads)
    assert count == 1
    assert len(libraries) == 8
    assert len(set(map(id, libraries))) == 1


def test_what_killed_processes_left_is_removed_in_time(tmp_path, cache):
    cache.mkdir()
    old = [cache / ".other-1.so.1.tmp", cache / ".other-1.so.lock"]
    new = [cache / ".other-2.so.2.tmp", cache / ".other-2.so.lock"]
    for path in (*old, *new):
        path.touch()
    for path in old:
        os.utime(path, (1, 1))
    path = compiler.host_library_path(write_source(tmp_path / "sample.cpp"))
    assert set(cache.iterdir()) == {path, *new}


def test_a_lock_that_a_killed_process_left_is_taken_over(tmp_path, cache, monkeypatch):
    source = write_source(tmp_path / "sample.cpp")
    seen = tmp_path / "seen"
    body = f"ls -A {shlex.quote(str(cache))} > {shlex.quote(str(seen))}"
    monkeypatch.setenv("CXX", str(write_wrapper(tmp_path, body)))
    path = compiler.host_library_path(source)
    assert seen.read_text() == f".{path.name}.lock\n"
    path.unlink()
    lock = cache / f".{path.name}.lock"
    lock.touch()
    os.utime(lock, (1, 1))
    assert compiles(lambda: compiler.host_library_path(source)) == (path, 1)
    assert seen.read_text() == f".{path.name}.lock\n"
    assert list(cache.iterdir()) == [path]


def test_a_lock_on_a_removed_file_does_not_count(tmp_path, cache, monkeypatch):
    flock = fcntl.flock
    locked = []

    def late_flock(descriptor, operation):
        if not locked:
            next(cache.glob(".*.lock")).unlink()
        locked.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late_flock)
    source = write_source(tmp_path / "sample.cpp")
    assert compiles(lambda: compiler.host_library_path(source))[1] == 1
    assert len(locked) == 2


def test_an_entry_that_appears_while_the_lock_is_taken_is_used(tmp_path, monkeypatch):
    source = write_source(tmp_path / "sample.cpp")
    path = compiler.host_library_path(source)
    content = path.read_bytes()
    path.unlink()
    flock = fcntl.flock

    def late_flock(descriptor, operation):
        path.write_bytes(content)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late_flock)
    assert compiles(lambda: compiler.host_library_path(source)) == (path, 0)


def test_without_file_locks_it_still_compiles(tmp_path, cache, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = compiler.host_library_path(write_source(tmp_path / "sample.cpp"))
    assert list(cache.iterdir()) == [path]


def test_an_unusable_cache_is_replaced_with_one_warning(tmp_path):
    sources = [write_source(tmp_path / f"{name}.cpp") for name in ("first", "second")]
    (tmp_path / "file").write_text("")
    script = (
        "import sys, warnings; from mkernel_cp import compiler\n"
        "warnings.simplefilter('always')\n"
        "for source in sys.argv[1:] * 2: print(compiler.host_library_path(source))\n"
        "print(compiler.compile_count())"
    )
    environment = {"MKERNEL_CACHE_DIR": str(tmp_path / "file" / "below"), "TMPDIR": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start(script, *sources, environment=environment, **pipes)
    out, err = process.communicate(timeout=60)
    *paths, count = out.split()
    assert len(set(paths)) == 2
    assert count == "2"
    assert all(path.startswith(str(tmp_path / "mkernel_cp-")) for path in paths)
    assert not list(tmp_path.glob("mkernel_cp-*"))
    assert err.count("RuntimeWarning: the cache of compiled code cannot be used") == 1


def test_a_cache_that_is_filled_is_read_without_writing(tmp_path, cache, monkeypatch):
    source = write_source(tmp_path / "sample.cpp")
    path = compiler.host_library_path(source)

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    for function in ("open", "mkdir", "replace", "utime", "unlink"):
        monkeypatch.setattr(os, function, refuse)
    assert compiles(lambda: compiler.host_library_path(source)) == (path, 0)


@pytest.mark.parametrize(
    ("cxx", "looked_for"),
    [
        (None, r"c\+\+, g\+\+, clang\+\+ in PATH"),
        ("no-such-c++ -m64", r"no-such-c\+\+ named by CXX"),
    ],
)
def test_a_missing_compiler_says_what_mends_it(tmp_path, monkeypatch, cxx, looked_for):
    monkeypatch.setenv("PATH", str(tmp_path))
    if cxx is not None:
        monkeypatch.setenv("CXX", cxx)
    with pytest.raises(ConfigurationError, match=looked_for) as caught:
        compiler.host_library(write_source(tmp_path / "sample.cpp"))
    assert "apt install g++" in str(caught.value)
    assert "dnf install gcc-c++" in str(caught.value)


def test_a_compiler_that_does_not_start_is_named(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no licence; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(ConfigurationError, match=r"broken --version failed .*3.*no licence"):
        compiler.host_library(write_source(tmp_path / "sample.cpp"))


@pytest.mark.parametrize(
    ("body", "complaint"),
    [("int value() { return undeclared; }", "undeclared"), ("int value() {}", "return")],
)
def test_a_failing_compilation_shows_command_and_text(tmp_path, cache, body, complaint):
    source = write_source(tmp_path / "sample.cpp", body)
    with pytest.raises(CompileError) as caught:
        compiler.host_library(source)
    command, text = str(caught.value).split("\n", 2)[1:]
    assert "-std=c++17" in command
    assert str(source) in command
    assert "error:" in text
    assert complaint in text
    assert list(cache.iterdir()) == []


def test_a_library_that_does_not_load_is_a_compile_error(tmp_path):
    body = "int value() { extern int nowhere(); return nowhere(); }"
    with pytest.raises(CompileError, match=r"cannot load .*nowhere"):
        compiler.host_library(write_source(tmp_path / "sample.cpp", body))


def test_a_compiler_that_fails_late_leaves_nothing(tmp_path, cache, monkeypatch):
    body = 'while [ "$1" != -o ]; do shift; done; echo half > "$2"; exit 1'
    monkeypatch.setenv("CXX", str(write_wrapper(tmp_path, body)))
    with pytest.raises(CompileError):
        compiler.host_library(write_source(tmp_path / "sample.cpp"))
    assert list(cache.iterdir()) == []


def test_the_compiler_runs_untranslated_and_without_preloaded_libraries(tmp_path, monkeypatch):
    seen = tmp_path / "seen"
    body = f'echo "preload=$LD_PRELOAD locale=$LC_ALL" > {shlex.quote(str(seen))}'
    monkeypatch.setenv("CXX", str(write_wrapper(tmp_path, body)))
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    compiler.host_library_path(write_source(tmp_path / "sample.cpp"))
    assert seen.read_text() == "preload= locale=C\n"


def test_hits_and_misses_are_logged(tmp_path, caplog):
    source = write_source(tmp_path / "sample.cpp")
    caplog.set_level(logging.DEBUG, "mkernel_cp.compiler")
    for _ in range(2):
        compiler.host_library_path(source)
    levels, texts = zip(*((r.levelno, r.getMessage()) for r in caplog.records), strict=True)
    assert levels == (logging.INFO, logging.DEBUG)
    assert texts[0].startswith("compiled sample in ")
    assert texts[1].startswith("cache hit sample: ")


@pytest.mark.parametrize("place", ["mkernel_cp/kernels", "kernels", None])
def test_kernels_are_found_in_a_wheel_and_in_a_checkout(tmp_path, place):
    package = tmp_path / "mkernel_cp"
    package.mkdir()
    (package / "__init__.py").touch()  # or an installed package would win over this one
    for module in ("compiler", "settings", "errors"):
        shutil.copy(PACKAGE / f"{module}.py", package)
    if place is not None:
        (tmp_path / place / "include" / "mkernel").mkdir(parents=True)
    script = (
        "from mkernel_cp import compiler\n"
        "try: print(compiler.include_dir(), compiler.kernel_source('sample'))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    process = start(
        script, environment={"PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE, cwd=tmp_path
    )
    output = process.communicate(timeout=60)[0]
    if place is None:
        assert output.startswith("ConfigurationError the kernels are missing")
    else:
        folder = (tmp_path / place).resolve()
        assert output.split() == [str(folder / "include"), str(folder / "sample.cu")]


def test_using_kernels_nests_and_ends(tmp_path):
    before = compiler.kernels_dir()
    with contextlib.suppress(KeyError), compiler.using_kernels(tmp_path / "a"):
        with compiler.using_kernels(tmp_path / "b"):
            assert compiler.include_dir() == str(tmp_path / "b" / "include")
        assert compiler.kernels_dir() == tmp_path / "a"
        raise KeyError
    assert compiler.kernels_dir() == before
