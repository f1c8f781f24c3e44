# shellcheck shell=sh
# Sourced after lib.sh by the targets that need Python.

# Set `python` to an interpreter, without packages.
plain_python() {
    python=${PYTHON:-python3}
    "$python" -c 'import json' 2>/dev/null || die "$python: does not run; this target needs Python 3 (or give PYTHON=)"
}

# Set `python` to an interpreter with numpy: the one there is, else a virtual environment with the pinned version.
numpy_python() {
    plain_python
    if "$python" -c 'import numpy' 2>/dev/null; then
        return
    fi
    venv=$WORK/venv
    if ! "$venv/bin/python" -c 'import numpy' 2>/dev/null; then
        mkdir -p "$WORK"
        run "$python" -m venv "$venv"
        run "$venv/bin/pip" install --quiet --disable-pip-version-check -r tests/reference/requirements.txt
    fi
    python=$venv/bin/python
}
