#!/usr/bin/env bash
# Builds FlashDSA and runs the whole job on real text: tokens of this project's pages and of the
# system's licence texts are packed into documents, metadata, selection and attention run on them,
# and the results are verified against the float64 reference.
set -euo pipefail
cd -P "$(dirname "$0")/.."
source scripts/common.sh

scripts/setup.sh
quietly configure release
quietly cmake --build --preset release

texts=(README.md docs/*.md)
for text in /usr/share/common-licenses/*; do
  if [ -f "$text" ] && [ ! -L "$text" ]; then texts+=("$text"); fi
done

# GLM-5.2's sizes on one of eight tensor-parallel ranks, with a selection narrow enough that most
# rows have to choose, and few enough tokens for the plain loops of the reference.
sizes=(--preset glm5.2 --heads 8 --topk 128 --tokens 8192)

flashdsa=build/release/flashdsa
"$flashdsa" synth build/release/text.safetensors "${sizes[@]}" --text "${texts[@]}"
"$flashdsa" run build/release/text.safetensors build/release/results.safetensors --verify
