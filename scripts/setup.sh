#!/usr/bin/env bash
# Installs with apt what is missing on Debian 12 or 13. Says nothing when nothing is missing.
#
#   scripts/setup.sh         what the library and the command need
#   scripts/setup.sh tests   the same, and what the tests and checks need
#   scripts/setup.sh docs    what scripts/docs.sh needs
set -euo pipefail

packages=(
  cmake               # configures the build
  ninja-build         # runs it
  g++                 # compiles it
  ccache              # makes the second build quick
  libfmt-dev          # text of error messages and tables, header-only
  libhwy-dev          # Highway: the vectors of the CPU backend, header-only
  libcli11-dev        # the command's options
  nlohmann-json3-dev  # safetensors headers, --json
)
test_packages=(
  libgtest-dev        # C++ tests
  librapidcheck-dev   # property tests
  python3             # NumPy oracle, checks of the tree
  python3-venv        # the environment that the Python package is tested in
  python3-dev         # headers for what torch.compile makes there
  pkg-config          # the second way to consume the installed library
  clang-format-19     # one version on both releases: versions differ in where they break lines
  clang-tidy-19       # likewise in what they find
)

docs_packages=(
  doxygen             # reads the public headers
  python3             # runs Sphinx
  python3-venv        # the environment that Sphinx stands in
)

if [ "${1:-}" = docs ]; then
  packages=("${docs_packages[@]}")
elif [ "${1:-}" = tests ]; then
  packages+=("${test_packages[@]}")
  # The oracle takes any interpreter that has NumPy; scripts/common.sh looks for it the same way.
  if ! python3 -c 'import numpy' 2>/dev/null && ! /usr/bin/python3 -c 'import numpy' 2>/dev/null
  then
    packages+=(python3-numpy)
  fi
fi

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  echo "setup: expected Debian's apt-get, got none; install the counterparts of: ${packages[*]}" >&2
  exit 1
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
  [ "$status" = "install ok installed" ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
  echo "setup: must be root to install packages; run: apt-get install ${missing[*]}" >&2
  exit 1
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
echo "setup: installing ${missing[*]}"
if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } \
    >"$log" 2>&1 </dev/null; then
  cat "$log" >&2
  echo "setup: apt-get could not install ${missing[*]}" >&2
  exit 1
fi
