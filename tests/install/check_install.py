"""Installs FlashDSA and builds a consumer against the installed tree, with CMake and with pkg-config.

The tree is installed under a path with a space and moved before it is used, so that a path of the
build that leaked into a package file shows.
"""

import argparse
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wpedantic", "-Werror"]


def run(command: list[str], **environment: str) -> str:
    """Runs a command and returns its output; a failure prints both and ends the check."""
    print("+", shlex.join(command), flush=True)
    result = subprocess.run(command, env={**os.environ, **environment}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode != 0:
        sys.exit(f"{result.stdout}\nexit code {result.returncode}")
    return result.stdout


def require(condition: bool, sentence: str) -> None:
    if not condition:
        sys.exit(sentence)


def build_flavour(options: argparse.Namespace, build: pathlib.Path) -> None:
    """Builds library and command in a folder of their own; ccache makes that cheap."""
    run([options.cmake, "-S", str(HERE.parent.parent), "-B", str(build), "-G", "Ninja",
         f"-DCMAKE_BUILD_TYPE={options.build_type}", f"-DCMAKE_CXX_COMPILER={options.compiler}",
         f"-DCMAKE_CXX_COMPILER_LAUNCHER={options.launcher}",
         f"-DBUILD_SHARED_LIBS={'ON' if options.flavour == 'shared' else 'OFF'}",
         *options.define])
    run([options.cmake, "--build", str(build)])


def install_and_move(options: argparse.Namespace, build: pathlib.Path) -> pathlib.Path:
    """Returns the root of the installed and moved tree."""
    first, second = options.work / "installed here", options.work / "moved there"
    for tree in (first, second):
        shutil.rmtree(tree, ignore_errors=True)
    run([options.cmake, "--install", str(build), "--prefix", str(first)])
    first.rename(second)
    return second


def check_files(options: argparse.Namespace, tree: pathlib.Path) -> None:
    source_headers = {path.name for path in (HERE.parent.parent / "include/flashdsa").iterdir()}
    headers = {path.name for path in (tree / "include/flashdsa").iterdir()}
    require(headers == source_headers, f"installed headers differ: {headers ^ source_headers}")
    library = "libflashdsa.so" if options.flavour == "shared" else "libflashdsa.a"
    libraries = [path.name for path in tree.rglob("libflashdsa.*")]
    require(library in libraries, f"expected {library}, got {libraries}")
    for path in [*tree.rglob("*.cmake"), *tree.rglob("*.pc")]:
        text = path.read_text()
        for leak in (str(HERE.parent.parent), str(options.work), "fmt::", "hwy"):
            require(leak not in text, f"{path} names {leak}")


def check_cmake_consumer(options: argparse.Namespace, tree: pathlib.Path) -> str:
    """Builds with find_package alone, where fmt and Highway cannot be found; returns the output."""
    build = options.work / "cmake consumer"
    shutil.rmtree(build, ignore_errors=True)
    run([options.cmake, "-S", str(HERE), "-B", str(build), "-G", "Ninja",
         f"-DCMAKE_CXX_COMPILER={options.compiler}", f"-DCMAKE_PREFIX_PATH={tree}",
         "-DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_hwy=ON"])
    run([options.cmake, "--build", str(build)])
    return run([str(build / "consumer")])


def check_pkg_config_consumer(options: argparse.Namespace, tree: pathlib.Path) -> str:
    """Builds with the plain compiler and pkg-config's flags; returns the program's output."""
    description = next(tree.rglob("flashdsa.pc"))
    program = options.work / "pkg-config consumer"
    for static in ([], ["--static"]):
        flags = run(["pkg-config", *static, "--cflags", "--libs", "flashdsa"],
                    PKG_CONFIG_PATH=str(description.parent))
        run([options.compiler, "-std=c++20", "-O1", *WARNINGS, str(HERE / "main.cc"),
             "-o", str(program), *shlex.split(flags)])
    return run([str(program)], LD_LIBRARY_PATH=str(description.parent.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flavour", choices=["static", "shared"], required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder of this check")
    parser.add_argument("--build", type=pathlib.Path, help="existing build of this flavour")
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--compiler", default="c++")
    parser.add_argument("--launcher", default="", help="compiler launcher, such as ccache")
    parser.add_argument("--build-type", default="Release")
    parser.add_argument("--define", action="append", default=[], help="further option for CMake")
    parser.add_argument("--version", required=True, help="version that the package must report")
    options = parser.parse_args()

    options.work.mkdir(parents=True, exist_ok=True)
    build = options.build
    if build is None:
        build = options.work / "build"
        build_flavour(options, build)
    tree = install_and_move(options, build)
    check_files(options, tree)
    expected = f"flashdsa {options.version}: the numbers are right\n"
    for check in (check_cmake_consumer, check_pkg_config_consumer):
        output = check(options, tree)
        require(output == expected, f"{check.__name__}: expected {expected!r}, got {output!r}")
    information = run([str(tree / "bin/flashdsa"), "info"])
    require(options.version in information, f"flashdsa info does not name {options.version}")


if __name__ == "__main__":
    main()
