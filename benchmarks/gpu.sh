#!/usr/bin/env bash
# Step time, tokens a second, memory, coefficients' and centering's share, and log-prob parity on a
# GPU, in under ten minutes on one H200; writes one JSON.
#
#   bash benchmarks/gpu.sh MODEL_FOLDER [OUT.json]
#
# Needs a Python with a CUDA build of torch, transformers and this package's dependencies; measures
# TRL's step, Liger's kernels and vLLM's drawing too where they are installed.  Nothing is fetched.
set -euo pipefail
model=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${2:-benchmarks/results/gpu.json}
mkdir -p .typing
[ -L .typing/windage ] || ln -s .. .typing/windage
PYTHONPATH=.typing HF_HUB_OFFLINE=1 "${PYTHON:-python3}" benchmarks/step.py \
  --model "$model" --device cuda --dtype bfloat16 --draw --out "$out"
