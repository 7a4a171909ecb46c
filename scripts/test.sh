#!/usr/bin/env bash
# Every check of the project: formatting, the site of the pages, the tests in the optimised build,
# clang-tidy, the Python package, the CUDA build where there is a CUDA compiler, and the tests under
# the sanitizers. The last line counts the tests of all runs.
set -euo pipefail
cd -P "$(dirname "$0")/.."
source scripts/common.sh

suites=core,metadata,selection,indexer,attention,conformance,cli,support
failures=0  # outside of ctest
reports=()

# check NAME COMMAND...: a step that passes in silence.
check() {
  local name=$1 start=$SECONDS
  shift
  if quietly "$@"; then
    echo "$name: good ($((SECONDS - start)) s)"
  else
    echo "$name: FAILED"
    failures=$((failures + 1))
    return 1
  fi
}

check_format() {
  local files file status=0
  mapfile -d '' files < <(git -c safe.directory="$PWD" ls-files -z '*.h' '*.cc' '*.cuh' '*.cu')
  if [ ${#files[@]} -eq 0 ]; then
    echo "expected C++ files under version control, got none"
    return 1
  fi
  for file in "${files[@]}"; do
    clang-format-19 --style=file "$file" | cmp -s - "$file" && continue
    echo "not as clang-format-19 -i leaves it: $file"
    status=1
  done
  return "$status"
}

# clang-tidy over what the cpu preset compiles of the library and the command, but for the one file
# with GCC's omp.h, which clang cannot read.
check_tidy() {
  sed -n 's/^ *"file": "\(.*\)",*$/\1/p' build/cpu/compile_commands.json | sort -u |
    grep -F -e "$PWD/src/" -e "$PWD/tools/" | grep -v '/core/parallel.cc$' | tr '\n' '\0' |
    xargs -0 -n 1 -P "$(nproc)" clang-tidy-19 -p build/cpu --quiet
}

# run_tests PRESET SUITES: builds a preset and runs its tests.
run_tests() {
  local preset=$1 log=build/$1/ctest.log
  check "$preset: configure" configure "$preset" || return 0
  check "$preset: build" cmake --build --preset "$preset" || return 0
  if ctest --preset "$preset" -j "$(nproc)" --no-tests=error --output-on-failure \
      --output-junit report.xml >"$log" 2>&1 </dev/null; then
    sed -n '/tests passed/,$p' "$log" | grep -v '/sm90 .*(Skipped)$'
    echo "and $(grep -c '/sm90 .*(Skipped)$' "$log" || true) tests of the sm90 engine (Skipped)"
  else
    grep -vE ' Passed +[0-9.]+ sec$|^ +Start +[0-9]+: ' "$log" || true
  fi
  reports+=("build/$preset/report.xml:$2")
}

# A wheel in a virtual environment of its own, then pytest; without PyTorch its tests are skipped.
install_wheel() {
  python3 -m venv --clear build/python
  CMAKE_CXX_COMPILER_LAUNCHER=$(launcher) build/python/bin/pip install -q '.[test]'
}

run_python() {
  local log=build/python/pytest.log
  check "python: wheel" install_wheel || return 0
  quietly build/python/bin/pip install -q torch==2.13.0 || echo "python: expected PyTorch, got none"
  if build/python/bin/pytest -q --junitxml build/python/report.xml >"$log" 2>&1 </dev/null; then
    tail -n 1 "$log"
  else
    cat "$log"
  fi
  reports+=("build/python/report.xml:pytest")
}

scripts/setup.sh tests
rm -f build/*/report.xml
check "clang-format" check_format || true
check "docs" scripts/docs.sh || true
run_tests cpu "$suites,install"
check "clang-tidy" check_tidy || true
run_python
if command -v nvcc >/dev/null; then
  if check "cuda: configure" configure cuda; then
    check "cuda: build" cmake --build --preset cuda || true
  fi
fi
run_tests dev "$suites"
"$(python)" tests/support/summary.py --failed "$failures" "${reports[@]}"
