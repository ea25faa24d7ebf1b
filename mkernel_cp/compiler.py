"""From native sources to loadable code: headers, toolchains, and the cache of compiled code.

An entry of the cache is one file, named by a key over all content that matters: the text of the
source and of every header that it includes, the options and the compiler. Paths and times are not
part of it. An entry ends with the SHA-256 digest of the bytes before it, which loaders of object
files ignore, so a damaged entry is noticed and compiled again.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib
import logging
import operator
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
import types
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from . import settings
from .errors import CompileError, ConfigurationError

logger = logging.getLogger("mkernel_cp.compiler")

# Part of every key: raise it when the same inputs are to give a different entry.
_FORMAT_VERSION = 1
_DIGEST_BYTES = hashlib.sha256().digest_size
_STALE_SECONDS = 3600.0
_PATIENCE_SECONDS = 600.0  # with another process that compiles the same
_SETTLED_NS = 10**9  # a file that has changed since may change again within a tick of its clock
_LEAST_ARCH = 80  # whose instructions the kernels use

# -O1: compiling takes longer than what is run once compiled.
_HOST_OPTIONS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror=return-type", "-pipe"),
)
# What /proc/cpuinfo calls the instructions of each level, best level first.
_X86_LEVELS = {
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 cx16 f16c fma lahf_lm movbe popcnt sse4_2 ssse3 xsave",
    "x86-64-v2": "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3",
}
_INCLUDE = re.compile(
    rb'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\w+))', re.MULTILINE
)

# "0 bytes spill stores" is no loss; C75xx are ptxas's notes on wgmma and setmaxnreg.
_LOSS = re.compile(r"[1-9]\d* bytes spill|\bC75\d\d\b|serializ|setmaxnreg.*ignored")

_kernels_override: Path | None = None
_sanitize_override: str | None = None

# Guards what follows: ranks may be threads of one process.
_one_at_a_time = threading.Lock()
_libraries: dict[str, ctypes.CDLL] = {}
_compile_count = 0
_private: Path | None = None
# What changes with a file; None if there is none.
_Version = tuple[int, ...] | None
# What was read for a source: where, and the texts.
_sources: dict[tuple, tuple[dict[str, _Version], list[bytes]]] = {}


def kernels_dir() -> Path:
    """Return the folder of the kernels: inside an installed package, or beside it in a checkout."""
    return _installed_kernels() if _kernels_override is None else _kernels_override


@functools.cache
def _installed_kernels() -> Path:
    package = Path(__file__).resolve().parent
    candidates = (package / "kernels", package.parent / "kernels")
    for folder in candidates:
        if (folder / "include" / "mkernel").is_dir():
            return folder
    raise ConfigurationError(
        f"the kernels are missing: neither {candidates[0]} nor {candidates[1]} has "
        "include/mkernel; install mkernel_cp again"
    )


@contextlib.contextmanager
def using_kernels(
    folder: str | os.PathLike[str] | None = None, *, sanitize: str | None = None
) -> Iterator[None]:
    """Take the kernels from another folder, or sanitized, while the context lasts: for tests.

    It holds for all threads of the process, since ranks may be threads.
    """
    global _kernels_override, _sanitize_override
    previous = _kernels_override, _sanitize_override
    if folder is not None:
        _kernels_override = Path(folder).absolute()
    _sanitize_override = sanitize
    try:
        yield
    finally:
        _kernels_override, _sanitize_override = previous


def include_dir() -> str:
    """Return the folder to pass to a compiler with ``-I`` for ``#include <mkernel/...>``."""
    return str(kernels_dir() / "include")


def kernel_source(name: str) -> Path:
    """Return the path of an operator's kernel, for instance of ``'allgather_gemm'``."""
    return kernels_dir() / f"{name}.cu"


def host_runtime() -> Path:
    """Return the path of what runs the kernels of the host target."""
    return kernels_dir() / "host_runtime.cpp"


def native_dir() -> Path:
    """Return the folder of the transport's C++ sources."""
    beside = kernels_dir() / "native"  # of kernels that tests have taken from another folder
    return beside if beside.is_dir() else Path(__file__).parent / "transport" / "native"


def compile_count() -> int:
    """Return how many times this process has run a compiler successfully to fill the cache."""
    return _compile_count


def host_library(
    source: str | os.PathLike[str],
    *,
    defines: Mapping[str, str | int] | None = None,
    sanitize: str | None = None,
    extra_include: Sequence[str | os.PathLike[str]] = (),
    options: Sequence[str] = (),
) -> ctypes.CDLL:
    """Compile a source for the host, unless the cache has it, and load it.

    Parameters
    ----------
    source : path
        A C++ file, or a ``.cu`` file, which is compiled as C++. What it exports needs default
        visibility.
    defines : mapping, optional
        Preprocessor macros and their values.
    sanitize : str, optional
        What to pass to the compiler's ``-fsanitize=``, for instance ``'thread'``.
    extra_include : sequence of paths, optional
        Folders of headers to search before `include_dir()`.
    options : sequence of str, optional
        More options of the compiler.

    Returns
    -------
    ctypes.CDLL
        The same object for the same content, in all threads. It is never unloaded.

    Raises
    ------
    ConfigurationError
        If there is no C++ compiler.
    CompileError
        If the source does not compile or the result does not load.
    """
    with _one_at_a_time:
        sanitize = sanitize or _sanitize_override
        entry = _HostEntry(source, defines, sanitize, extra_include, options)
        library = _libraries.get(entry.key)
        if library is None:
            path = _cached(entry.file_name, entry.name, entry.build)
            try:
                library = ctypes.CDLL(str(path))
            except OSError as error:
                raise CompileError(f"cannot load {path}, compiled from {source}: {error}") from None
            _libraries[entry.key] = library
        return library


def host_library_path(
    source: str | os.PathLike[str],
    *,
    defines: Mapping[str, str | int] | None = None,
    sanitize: str | None = None,
    extra_include: Sequence[str | os.PathLike[str]] = (),
) -> Path:
    """Do as `host_library`, but return the path of the shared library and do not load it."""
    with _one_at_a_time:
        entry = _HostEntry(source, defines, sanitize or _sanitize_override, extra_include)
        return _cached(entry.file_name, entry.name, entry.build)


def cubin(
    source: str | os.PathLike[str],
    arch: str,
    *,
    defines: Mapping[str, str | int] | None = None,
    options: Sequence[str] = (),
) -> Path:
    """Compile a ``.cu`` file for a GPU with NVRTC, unless the cache has it. Needs no GPU.

    Parameters
    ----------
    source : path
    arch : str
        ``'sm_80'``, ``'sm_90a'`` and so on.
    defines : mapping, optional
        Preprocessor macros and their values.
    options : sequence of str, optional
        More options of NVRTC.

    Returns
    -------
    pathlib.Path
        The cubin. Machine code, not PTX: a driver may be older than NVRTC.

    Raises
    ------
    ConfigurationError
        If there is no NVRTC.
    CompileError
        If the source does not compile.
    """
    with _one_at_a_time:
        entry = _CudaEntry(source, arch, defines, options)
        return _cached(entry.file_name, entry.name, entry.build)


def check_arch(arch: str) -> None:
    """Raise ValueError for what is not the name of an architecture of GPUs."""
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise ValueError(f"arch {arch!r}: not allowed; use one as sm_80 or sm_90a")
    if int(arch[3:].rstrip("af")) < _LEAST_ARCH:
        raise ValueError(f"arch {arch!r}: too old; use sm_{_LEAST_ARCH} or later")


def losses(log: str) -> list[str]:
    """Return the lines in which ptxas says that it made code slow: spills, serialised multiplies.

    Parameters
    ----------
    log : str
        Of a compilation with ``--ptxas-options=-v``.
    """
    return [line.strip() for line in log.splitlines() if _LOSS.search(line)]


class _CudaEntry:
    """One source with its options, for NVRTC."""

    def __init__(
        self,
        source: str | os.PathLike[str],
        arch: str,
        defines: Mapping[str, str | int] | None,
        options: Sequence[str],
    ) -> None:
        check_arch(arch)
        self.source = Path(source).absolute()
        self.name = f"{self.source.stem} for {arch}"
        self.nvrtc = nvrtc()
        self.options = [
            *("-std=c++17", f"--gpu-architecture={arch}", "--ptxas-options=-v"),
            *_macro_options(defines),
            *options,
        ]
        version = _answer(self.nvrtc, self.nvrtc.nvrtcVersion())
        key = _key([*self.options, f"NVRTC {version}"], _texts(self.source, [include_dir()]))
        self.file_name = f"{self.source.stem}-{arch}-{key}.cubin"

    def build(self, output: Path) -> None:
        options = [*self.options, f"-I{include_dir()}"]
        code, log = nvrtc_compile(self.source, options)
        if code is None:
            raise CompileError(
                f"{self.source} does not compile\nnvrtc {shlex.join(options)}\n{log}"
            )
        for line in losses(log):
            logger.info("%s: %s", self.name, line)
        output.write_bytes(code)


def nvrtc() -> types.ModuleType:
    """Return cuda-python's bindings of NVRTC; ConfigurationError if it is not installed."""
    try:
        module = importlib.import_module("cuda.bindings.nvrtc")
        _answer(module, module.nvrtcVersion())
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            f"no NVRTC, which compiles kernels for GPUs ({error}); install it with "
            "mkernel_cp with its extra cu13 (cu12 for a driver of CUDA 12)"
        ) from None
    return module


def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version."""
    module = nvrtc()
    major, minor = _answer(module, module.nvrtcVersion())
    return major, minor


def nvrtc_path() -> str:
    """Return the path of the library that the bindings of NVRTC have found."""
    nvrtc()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        mapped = (line.split(maxsplit=5)[-1].strip() for line in lines)
        return next(path for path in mapped if "/libnvrtc.so" in path)


def nvrtc_compile(
    source: str | os.PathLike[str], options: Sequence[str]
) -> tuple[bytes | None, str]:
    """Return the cubin of a source, or None if it does not compile, and the compiler's log."""
    library = nvrtc()

    def output(what: str) -> bytes:
        (size,) = _answer(library, getattr(library, f"nvrtcGet{what}Size")(program))
        data = bytearray(size)
        _answer(library, getattr(library, f"nvrtcGet{what}")(program, data))
        return bytes(data)

    text, name = Path(source).read_bytes(), os.fsencode(source)
    (program,) = _answer(library, library.nvrtcCreateProgram(text, name, 0, None, None))
    try:
        encoded = [option.encode() for option in options]
        (status,) = library.nvrtcCompileProgram(program, len(encoded), encoded)
        log = output("ProgramLog").rstrip(b"\0").decode(errors="replace")
        failed = status != library.nvrtcResult.NVRTC_SUCCESS
        return None if failed else output("CUBIN"), log
    finally:
        library.nvrtcDestroyProgram(program)


def _answer(library: types.ModuleType, result: tuple) -> tuple:
    """Return the values of a call to NVRTC; RuntimeError for a status that is not success."""
    status, *values = result
    if status != library.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC: {status.name}")
    return tuple(values)


class _HostEntry:
    """One source with its options, for the system's C++ compiler."""

    def __init__(
        self,
        source: str | os.PathLike[str],
        defines: Mapping[str, str | int] | None,
        sanitize: str | None,
        extra_include: Sequence[str | os.PathLike[str]],
        options: Sequence[str] = (),
    ) -> None:
        self.source = Path(source).absolute()
        self.name = self.source.stem
        self.folders = [*(Path(folder).absolute() for folder in extra_include), include_dir()]
        self.compiler = _find_cxx()
        self.options = [*_HOST_OPTIONS, *_march()]
        if sanitize is not None:
            self.options += [f"-fsanitize={sanitize}", "-g"]
        self.options += [*_macro_options(defines), *options]
        self.key = _key(
            [*self.compiler[1:], *self.options, _identity(self.compiler), platform.machine()],
            _texts(self.source, self.folders),
        )
        self.file_name = f"{self.name}-{self.key}.so"

    def build(self, output: Path) -> None:
        command = [
            *self.compiler,
            *self.options,
            *(f"-I{folder}" for folder in self.folders),
            *("-o", str(output), "-x", "c++", str(self.source)),
        ]
        result = _run(command)
        if result.returncode != 0:
            raise CompileError(
                f"{self.source} does not compile (exit status {result.returncode})\n"
                f"{shlex.join(command)}\n{result.stdout}"
            )
        if result.stdout:
            logger.info("compiler's remarks on %s:\n%s", self.name, result.stdout)


def macros(defines: Mapping[str, str | int] | None) -> dict[str, str]:
    """Return preprocessor macros and their values as texts, in the order of their names."""
    return {name: _macro(name, value) for name, value in sorted((defines or {}).items())}


def _macro(name: str, value: str | int) -> str:
    if isinstance(value, str):
        return value
    try:
        return str(int(operator.index(value)))  # the preprocessor takes the word True for 0
    except TypeError:
        raise TypeError(f"defines: {name}={value!r}: use a string or an integer") from None


def _macro_options(defines: Mapping[str, str | int] | None) -> list[str]:
    return [f"-D{name}={value}" for name, value in macros(defines).items()]


def _find_cxx() -> tuple[str, ...]:
    chosen = settings.cxx()
    looked_for = chosen[:1] if chosen else ["c++", "g++", "clang++"]
    for program in looked_for:
        path = shutil.which(program)
        if path is not None:
            return (path, *(chosen or ())[1:])
    mend = "install one (apt install g++, or dnf install gcc-c++) or set CXX to the path of one"
    where = "named by CXX" if chosen else "in PATH"
    raise ConfigurationError(f"no C++ compiler: looked for {', '.join(looked_for)} {where}; {mend}")


@functools.cache
def _identity(compiler: tuple[str, ...]) -> str:
    command = [*compiler, "--version"]
    result = _run(command)
    if result.returncode != 0:
        raise ConfigurationError(
            f"{shlex.join(command)} failed (exit status {result.returncode}): {result.stdout}"
        )
    return result.stdout


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    # A translated text would change the key, and a preloaded sanitizer would run in the compiler.
    environment["LC_ALL"] = "C"
    environment.pop("LD_PRELOAD", None)
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


@functools.cache
def _march() -> tuple[str, ...]:
    """Return a fixed instruction set: unlike hosts may share the cache, so never the native one."""
    machine = platform.machine()
    if machine == "aarch64":
        return ("-march=armv8-a",)
    if machine != "x86_64":
        return ()
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
        has = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    for level, needs in _X86_LEVELS.items():
        if has.issuperset(needs.split()):
            return (f"-march={level}",)
    return ("-march=x86-64",)


def _key(options: Iterable[str], texts: Iterable[bytes]) -> str:
    digest = hashlib.sha256(b"%d" % _FORMAT_VERSION)
    for part in (*(os.fsencode(option) for option in options), *texts):
        digest.update(b"\0%d\0" % len(part))
        digest.update(part)
    return digest.hexdigest()


def _texts(file: Path, folders: Sequence[str | Path]) -> list[bytes]:
    """Return the text of a file and of each header that it includes, once, in order of inclusion.

    An inclusion counts even where the preprocessor would skip it: at worst a key changes in vain.
    A header that is not found belongs to the system, and the compiler's identity stands for it.
    What is as it was when it was last read is not read again.
    """
    key = (file, *folders)
    known = _sources.get(key)
    if known and all(_version(path) == version for path, version in known[0].items()):
        return known[1]
    looked_at: dict[str, _Version] = {}
    settled = time.time_ns() - _SETTLED_NS
    texts = list(_read(file, folders, set(), looked_at))
    if all(version is None or max(version[:2]) < settled for version in looked_at.values()):
        _sources[key] = looked_at, texts
    return texts


def _version(path: str) -> _Version:
    try:
        is_now = os.stat(path)
    except OSError:
        return None
    return (is_now.st_mtime_ns, is_now.st_ctime_ns, is_now.st_size, is_now.st_ino, is_now.st_dev)


def _read(
    file: Path, folders: Sequence[str | Path], seen: set[Path], looked_at: dict[str, _Version]
) -> Iterator[bytes]:
    """Read them, and note where headers were looked for, and what was there."""
    seen.add(file.resolve())
    looked_at[str(file)] = _version(str(file))
    text = file.read_bytes()
    yield text
    for quoted, bracketed, macro in _INCLUDE.findall(text):
        if macro:
            raise CompileError(
                f"{file}: '#include {os.fsdecode(macro)}' hides from the cache which header is "
                "meant; write the header's name"
            )
        for folder in (file.parent, *folders) if quoted else folders:
            header = Path(folder, os.fsdecode(quoted or bracketed))
            looked_at[str(header)] = _version(str(header))
            if header.is_file():
                if header.resolve() not in seen:
                    yield from _read(header, folders, seen, looked_at)
                break


def _cached(file_name: str, name: str, build: Callable[[Path], None]) -> Path:
    """Return the path of an intact entry, built by ``build(path)`` if no cache has it."""
    try:
        return _find_or_build(settings.cache_dir() / file_name, name, build)
    except (OSError, ConfigurationError) as error:
        return _find_or_build(_private_dir(error) / file_name, name, build)


def _private_dir(reason: Exception) -> Path:
    """Return a folder that lasts as long as this process; the first time, warn with the reason."""
    global _private
    if _private is None:
        _private = Path(tempfile.mkdtemp(prefix="mkernel_cp-"))
        atexit.register(shutil.rmtree, _private, ignore_errors=True)
        warnings.warn(
            f"the cache of compiled code cannot be used ({reason}); this process compiles for "
            "itself; set MKERNEL_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
    return _private


def _find_or_build(entry: Path, name: str, build: Callable[[Path], None]) -> Path:
    lock_path = entry.with_name(f".{entry.name}.lock")
    pause, began = 0.001, time.monotonic()
    while not _is_intact(entry):
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = _try_lock(lock_path)
        waited = time.monotonic() - began
        if lock is None and waited < _PATIENCE_SECONDS:
            if pause == 0.001:
                logger.info("waiting for another process to compile %s", name)
            # Short sleeps, not a blocking lock, so that a signal handler can end the wait.
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            continue
        if lock is None:  # entries are renamed into place whole: two who compile do no harm
            logger.warning("%s has been compiled elsewhere for %.0f s: not waiting", name, waited)
        try:
            # Another process may have finished between our look and our lock.
            if not _is_intact(entry):
                _build_entry(entry, name, build)
                return entry
        finally:
            if lock is not None:
                _unlock(lock_path, lock)
    logger.debug("cache hit %s: %s", name, entry)
    return entry


def _is_intact(entry: Path) -> bool:
    try:
        content = entry.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _build_entry(entry: Path, name: str, build: Callable[[Path], None]) -> None:
    global _compile_count
    _remove_stale(entry.parent)
    temporary = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}.tmp")
    start = time.monotonic()
    try:
        build(temporary)
        with open(temporary, "r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, entry)
    finally:
        temporary.unlink(missing_ok=True)
    _compile_count += 1
    logger.info("compiled %s in %.1f s: %s", name, time.monotonic() - start, entry)


def _remove_stale(folder: Path) -> None:
    """Remove what killed processes left: no compilation takes as long as these have been there."""
    for path in (*folder.glob(".*.tmp"), *folder.glob(".*.lock")):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def _try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock file, or None while another one holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A holder removes its file before it lets go: a lock on a removed file excludes nobody.
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            os.utime(descriptor)  # a file that a killed process left must not look stale now
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        # Without locks every process compiles for itself; entries are renamed into place whole.
        logger.debug("no file locks in %s: %s", path.parent, error)
        return descriptor
    os.close(descriptor)
    return None


def _unlock(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)
