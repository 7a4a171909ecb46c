#!/usr/bin/env bash
# The tests of the sm90 backend from programs that were built elsewhere (docs/testing.md): every C++
# test in a process of its own, so that a fault of the device ends one test and no other, then the
# conformance cases through the command. Needs bash, awk and, for the cases, a python3 with NumPy.
#
#   scripts/test_device.sh FOLDER [FILTER [TOOL]]
#
# FOLDER holds core_tests, metadata_tests, selection_tests, indexer_tests, attention_tests and
# flashdsa, and shared libraries that the machine lacks; what is not there is not run. FILTER is one
# of GoogleTest. TOOL is one of compute-sanitizer (memcheck, racecheck, synccheck), under which the
# tests then run, without the conformance cases; what it finds is a failure. The last line counts
# the C++ tests; the exit code is 0 when nothing failed.
set -euo pipefail
folder=$(cd "$1" && pwd)
filter=${2:-*sm90*:*OnDevice*:Planned*}
export tool=${3:-}
cd -P "$(dirname "$0")/.."
export LD_LIBRARY_PATH="$folder:${LD_LIBRARY_PATH:-}" OMP_WAIT_POLICY=passive
export logs timeout=300
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# "program test" of every test that the filter takes. GoogleTest lists suites at the line's begin
# and tests indented below them.
list_tests() {
  local program
  for program in "$folder"/*_tests; do
    "$program" --gtest_list_tests --gtest_filter="$filter" |
      awk -v program="$program" '/^[^ ].*\.$/ { suite = $1 } /^ / { print program, suite $1 }'
  done
}

# run_test PROGRAM TEST: its log goes to a file whose name tells how it ended.
run_test() {
  local log="$logs/${1##*/}.${2//\//-}" status=0 end=passed sanitizer=()
  [ -z "$tool" ] || sanitizer=(compute-sanitizer --tool "$tool" --error-exitcode 9)
  timeout "$timeout" "${sanitizer[@]}" "$1" --gtest_filter="$2" --gtest_color=no >"$log" 2>&1 ||
    status=$?
  grep -q '^\[  SKIPPED \]' "$log" && end=skipped
  [ "$status" -eq 0 ] || end=failed
  mv "$log" "$log.$end"
  [ "$end" != failed ] || sed "s|^|${1##*/}: |" "$log.$end"
}
export -f run_test

count() { find "$logs" -name "*.$1" | wc -l; }

list_tests | xargs -r -P "$(nproc)" -L 1 bash -c 'run_test "$@"' run_test
status=0
if [ -z "$tool" ] && [ -x "$folder/flashdsa" ] && python3 -c 'import numpy' 2>/dev/null; then
  python3 tests/conformance/oracle/run_cases.py --bin "$folder/flashdsa" --backend sm90 \
    --jobs "$(nproc)" --strict || status=1
fi
echo "$(count passed) passed, $(count failed) failed, $(count skipped) skipped"
[ "$(count passed)" -gt 0 ] && [ "$(count failed)" -eq 0 ] && [ "$status" -eq 0 ]
