#!/usr/bin/env bash
# Builds the site of README.md and docs/ into build/docs/html, with a reference made from the public
# headers and from the docstrings. Warnings are errors: a link, an anchor or an image that is not
# there, a page that README.md does not list, a function or an argument without a word about it.
# Links to other sites are not followed.
set -euo pipefail
cd -P "$(dirname "$0")/.."

scripts/setup.sh docs
site=build/docs/html
venv=build/docs/venv
rm -rf "$site" build/docs/doxygen
[ -x "$venv/bin/pip" ] || python3 -m venv --clear "$venv"
"$venv/bin/pip" install -q -r docs/requirements.txt
mkdir -p build/docs
doxygen docs/Doxyfile
PYTHONPATH=python "$venv/bin/sphinx-build" -q -W --keep-going -c docs . "$site"
echo '<!doctype html><meta http-equiv="refresh" content="0; url=README.html">' >"$site/index.html"
echo "docs: $site/index.html"
