#!/bin/sh
# Real SGLang 0.5.23 for CPU into a fresh Python 3.11 venv, with this package beside it. usage: install.sh VENV
# About 7 minutes and 2.8 GB. `--no-deps`, because SGLang's own pins name a CUDA build of torch and GPU kernels
# that its CPU path never calls; `shim/` stands in for the two that it imports all the same.
set -eu
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
if [ ! -f "$venv/.installed" ]; then
  "${PYTHON:-python3.11}" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --no-deps -r "$here/requirements.txt"
  touch "$venv/.installed"
fi
if [ ! -f "$venv/.freeze" ]; then
  "$venv/bin/python" -m pip freeze > "$venv/.freeze"
  "$venv/bin/python" -m pip check > "$venv/.check" || true
fi
# What is ours, without letting pip move any of the engine's packages: the package itself (its plugin is found by
# its entry point, and needs torch and numpy only), and for the suite, which runs the follower in here too, pytest
# and what SGLang's CPU install lacks; numba is the one that SGLang itself asks for.
"$venv/bin/python" -m pip install -q --no-deps -e "$root"
"$venv/bin/python" -m pip install -q --no-deps -r "$here/test-requirements.txt"
