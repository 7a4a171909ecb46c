"""Holds the rules of who may include whom over the tree; docs/architecture.md shows them as a table.

Prints one line per broken rule and exits 1 when there is one.
"""

import pathlib
import re
import sys
from typing import Iterator, NamedTuple

SUFFIXES = {".h", ".cc", ".cuh", ".cu"}
FOLDERS = ("include", "src", "tools", "bench", "tests", "docs", "python")

INCLUDE = re.compile(r"^\s*#\s*include\s*(.*)$", re.MULTILINE)
TARGET = re.compile(r'["<]([^">]+)[">]')

STANDARD = r"[a-z_0-9]+"  # the standard library: <vector>, <cmath>
PUBLIC = r"flashdsa/.+"
FMT = r"fmt/.+"
HIGHWAY = r"hwy/.+"
CORE = r"core/(?!cuda/).+"
CUDA = r"cuda\w*\.h|(cute|cutlass|cub|thrust|cuda)/.+"
PLAN = r"selection/plan_format\.h"  # what the attention kernels walk
POSIX = r"fcntl\.h|unistd\.h|sys/[a-z]+\.h"


class Rule(NamedTuple):
    """What the files of a folder may include; {op} and {gpu} stand for the file's own folders."""

    files: str
    may: tuple[str, ...]


# The first rule whose pattern matches a file's path holds for it.
RULES = (
    Rule(r"include/flashdsa/", (STANDARD, PUBLIC)),
    Rule(r"src/core/simd/", (STANDARD, PUBLIC, CORE, FMT, HIGHWAY, r"immintrin\.h")),
    Rule(r"src/core/cuda/", (STANDARD, PUBLIC, r"core/.+", FMT, CUDA)),
    Rule(r"src/core/", (STANDARD, PUBLIC, CORE, FMT)),
    Rule(r"src/operations\.cc$", (STANDARD, PUBLIC, CORE, r"\w+/backends\.h")),
    Rule(r"src/(?P<op>\w+)/reference/",
         (STANDARD, PUBLIC, r"{op}/(params|backends)\.h", r"{op}/reference/.+",
          r"core/(element|parallel|progress)\.h")),
    Rule(r"src/(?P<op>\w+)/cpu/",
         (STANDARD, PUBLIC, r"{op}/(params|backends)\.h", r"{op}/cpu/.+", CORE, FMT,
          HIGHWAY)),
    Rule(r"src/(?P<op>\w+)/(?P<gpu>sm80|sm90)/",
         (STANDARD, PUBLIC, r"{op}/(params|backends)\.h", r"{op}/{gpu}/.+", r"core/.+", FMT,
          CUDA, PLAN)),
    Rule(r"src/(?P<op>\w+)/[^/]+$", (STANDARD, PUBLIC, r"{op}/[^/]+", CORE, FMT, PLAN)),
    Rule(r"tools/", (STANDARD, PUBLIC, r"tools/.+", FMT, POSIX, r"CLI/.+", r"nlohmann/.+")),
    Rule(r"python/src/", (STANDARD, PUBLIC, r"python/src/.+", r"tvm/ffi/.+")),
    Rule(r"bench/", (STANDARD, PUBLIC, r"bench/.+", FMT, HIGHWAY, r"benchmark/.+", r"dnnl\.hpp",
                     r"oneapi/dnnl/.+")),
    Rule(r"tests/conformance/", (STANDARD,)),
    Rule(r"tests/", (r".+",)),
    Rule(r"docs/examples/", (STANDARD, PUBLIC)),
)

# Single includes that no rule gives, each with its reason. One that is no longer needed is an error.
EXCEPTIONS = {
    ("src/core/parallel.cc", "omp.h"): "the one place that asks OpenMP for a thread's number",
    ("src/core/runtime.cc", "sched.h"): "the CPUs that the process may use",
    ("tools/bench_check.cc", "selection/plan_format.h"): "judges what a plan holds",
    ("tools/bench_peak.cc", "attention/cpu/select_kernels.h"): "times the kernels' own product",
    ("tools/bench_peer.cc", "bench/peer.h"): "what a peer's shared library exports",
    ("tools/bench_peer.cc", "dlfcn.h"): "loads a peer's shared library",
    ("tools/gpu_cuda.cc", "core/cuda/check.h"): "errors of CUDA in the library's words",
    ("tools/gpu_cuda.cc", "cuda_runtime_api.h"): "the command on CUDA devices",
    ("tools/gpu_heads.cu", "core/cuda/check.h"): "errors of CUDA in the library's words",
    ("tools/placement.cc", "core/device.h"): "waits for a stream",
    ("tools/placement.cc", "core/make_tensor.h"): "memory for results, on any device",
    ("bench/peer.h", "stdint.h"): "plain C, so that any compiler takes it",
    ("bench/products.cc", "attention/cpu/select_kernels.h"): "our product beside oneDNN's",
    ("bench/products.cc", "core/scratch.h"): "likewise, in the backend's scratch",
    ("bench/products.cc", "omp.h"): "one thread for each of oneDNN's products",
}


def includes(text: str) -> Iterator[str]:
    """What a file includes; a name made by a macro comes as it is written."""
    for match in INCLUDE.finditer(text):
        target = TARGET.match(match.group(1))
        yield target.group(1) if target else match.group(1)


def allowed(path: str, name: str) -> bool | None:
    """Whether `path` may include `name`; None when no rule covers the path."""
    for rule in RULES:
        match = re.match(rule.files, path)
        if match:
            patterns = rule.may
            for folder, value in match.groupdict().items():
                patterns = [pattern.replace(f"{{{folder}}}", value) for pattern in patterns]
            return any(re.fullmatch(pattern, name) for pattern in patterns)
    return None


def violations(files: dict[str, str],
               exceptions: dict[tuple[str, str], str] = EXCEPTIONS) -> list[str]:
    """The broken rules of `files`, which maps a path from the root to its text."""
    found = []
    unused = set(exceptions)
    for path, text in sorted(files.items()):
        for name in includes(text):
            if (path, name) in exceptions:
                unused.discard((path, name))
                continue
            answer = allowed(path, name)
            if answer is None:
                found.append(f"{path}: no rule says what this folder may include")
                break
            if not answer:
                found.append(f"{path}: must not include {name}")
    found += [f"{path}: the exception for {name} is not used" for path, name in sorted(unused)]
    return found


def read_tree(root: pathlib.Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
            for folder in FOLDERS for path in (root / folder).rglob("*")
            if path.suffix in SUFFIXES}


def main() -> int:
    files = read_tree(pathlib.Path(sys.argv[1]))
    if not files:
        print(f"{sys.argv[1]}: expected C++ files, got none")
        return 1
    found = violations(files)
    print("\n".join(found) if found else f"{len(files)} files keep the rules")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
