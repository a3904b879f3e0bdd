#!/bin/sh
# Real SGLang on a CPU. usage: [OVERLAP=0] [DTYPE=bfloat16] serve.sh VENV MODEL_DIR PORT [more sglang flags]
# The overlap scheduler is on, as SGLang has it by default; OVERLAP=0 switches it off.
venv=$1 model=$2 port=$3; shift 3
here=$(cd "$(dirname "$0")" && pwd)
export SGLANG_USE_CPU_ENGINE=1 PYTHONPATH="$here/shim${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export OMP_NUM_THREADS=1
[ "${OVERLAP:-1}" = 1 ] || set -- --disable-overlap-schedule "$@"
exec "$venv/bin/python" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" --device cpu \
  --attention-backend torch_native \
  --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled \
  --sampling-backend pytorch --grammar-backend none --dtype "${DTYPE:-float32}" \
  --max-total-tokens 16384 --max-running-requests 8 --mem-fraction-static 0.1 "$@"
