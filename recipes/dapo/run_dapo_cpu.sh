#!/usr/bin/env bash
# DAPO on a machine without a GPU. Usage: recipes/dapo/run_dapo_cpu.sh [overrides]
# Creates the model and the data in CPU_ASSETS and records to DUMPS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-python3}
CPU_ASSETS=${CPU_ASSETS:-$HOME/.cache/verl-rollout-skip/assets}
DUMPS=${DUMPS:-$HOME/.cache/verl-rollout-skip/dumps}

$PYTHON -m recipes.cpu.assets "$CPU_ASSETS"
eval "$($PYTHON -m recipes.cpu.environment "$CPU_ASSETS")"

# rollout_skip.mode=cache records the rollouts in the first run and loads them in the next one
exec $PYTHON -m recipes.dapo.main_dapo --config-name=dapo_cpu \
    trainer.use_v1=False \
    trainer.total_training_steps=5 \
    rollout_skip.mode=cache rollout_skip.dump_dir="$DUMPS" \
    "$@"
