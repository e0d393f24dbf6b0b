#!/usr/bin/env bash
# Make a virtual environment: make_venv.sh DIR [PYTHON]
# Without PYTHON, takes the first of the usual names that is new enough and runs.
set -euo pipefail

dir=$1
asked=${2:-}

fail() {
    echo "make_venv: $*" >&2
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

python=
for name in ${asked:-python3 python3.13 python3.12 python3.11 python3.14}; do
    if new_enough "$name"; then
        python=$name
        break
    fi
done
if [ -z "$python" ]; then
    fail "${asked:-no python3} is no Python >= 3.11 that runs here; name one with 'make PYTHON=/path/to/python'"
fi

rm -rf "$dir"
if "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    "$python" -m venv "$dir"
elif "$python" -c 'import pip, venv' >/dev/null 2>&1; then
    # Debian without python3-venv: the module is there, the pip to put inside is not.
    "$python" -m venv --without-pip "$dir"
    "$python" -m pip --python "$dir/bin/python" install --quiet pip
elif "$python" -m virtualenv --version >/dev/null 2>&1; then
    "$python" -m virtualenv --quiet "$dir"
else
    fail "$python can not make virtual environments: install its venv module (Debian: apt-get install python3-venv)"
fi
