# Sourced by the other scripts, from the repository's root.

# configure PRESET: with ccache where there is one, and the Python that has NumPy.
configure() {
  cmake --preset "$1" -DCMAKE_CXX_COMPILER_LAUNCHER="$(launcher)" \
    -DCMAKE_CUDA_COMPILER_LAUNCHER="$(launcher)" -DPython3_EXECUTABLE="$(python)"
}

# What compilers are called through: ccache, or nothing where there is none.
launcher() { command -v ccache || true; }

# The first Python that can import NumPy; the one in PATH may be somebody's own. Empty: none can.
python() {
  local candidate
  for candidate in "$(command -v python3)" /usr/bin/python3; do
    if "$candidate" -c 'import numpy' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

# quietly COMMAND...: shows the output only when the command fails, without the build's steps
# that went well and clang-tidy's count of what it left out.
quietly() {
  local log status=0
  log=$(mktemp)
  "$@" >"$log" 2>&1 </dev/null || status=$?
  [ "$status" -eq 0 ] || grep -vE '^\[[0-9]+/[0-9]+\] |^[0-9]+ warnings generated' "$log" || true
  rm -f "$log"
  return "$status"
}
