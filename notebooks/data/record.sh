#!/usr/bin/env bash
# Records what notebooks/data/runs holds anew, in about two minutes on a quiet machine of two cores: bash notebooks/data/record.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
if [ -e runs/notebooks ]; then
    echo "error: runs/notebooks is there already; move it away first" >&2
    exit 2
fi
for method in none bubble+suffix suffix bubble; do
    .venv/bin/torchrun --nproc_per_node=2 --standalone train.py --config configs/tiny_cpu_bulk.yaml \
        rollout.num_prompts_per_step=8 rollout.num_generations=4 run.max_steps=30 run.eval_steps=10 "run.timeline_steps=[5,14,23]" \
        speculative.method=$method run.output_dir=runs/notebooks/$method
    kept=notebooks/data/runs/$method
    mkdir -p "$kept"
    cp runs/notebooks/$method/{config.yaml,metrics.jsonl} "$kept"
    case $method in
    none | bubble+suffix)
        mkdir -p "$kept/timeline"
        cp runs/notebooks/$method/timeline/*.json "$kept/timeline"
        ;;
    esac
done
