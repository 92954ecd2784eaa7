#!/usr/bin/env bash
# The full shape on eight GPUs of one host: TP4 prefill + TP4 decode of the whole model, by `isthmus up`.
#
#   deploy/runs/full_shape.sh                          all steps, each under 8 minutes
#   deploy/runs/full_shape.sh serve_short transfer     some of: correctness all_reduce step serve_short serve_long transfer
#   RANKS=2 deploy/runs/full_shape.sh                  TP2 + TP2 on four GPUs
#   DRY=1 OUT=dry deploy/runs/full_shape.sh       the same commands on the CPU, TP4 + TP4 of the tiny model
#
# JSON, HTML and logs go to $OUT (docs/results). Exit code 1 if a step failed; docs/runs.md says what each leaves.
set -u
name=full_shape
steps="correctness all_reduce step serve_short serve_long transfer"
. "$(dirname "$0")/steps.sh"
ranks=${RANKS:-4}

# four_groups FOLDER: the tiny model's config with four output groups, and its tokenizer; weights are drawn at random.
four_groups() {
    "$PYTHON" - "$1" <<'END'
import json, os, pathlib, shutil, sys
from deploy.tiny_model import ensure_tiny_model
tiny, folder = pathlib.Path(ensure_tiny_model(os.environ)), pathlib.Path(sys.argv[1])
shutil.copytree(tiny, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
config = json.loads((tiny / "config.json").read_text()) | {"o_groups": 4}
(folder / "config.json").write_text(json.dumps(config))
END
}

if [ -n "$DRY" ]; then
    model=$OUT/tiny-four-groups
    four_groups "$model" || exit 1
    device=cpu yaml=deploy/runs/full_shape_dry.yaml port=18470
    geo="--device cpu --dtype float32 --by expert --lengths 9 --steps 1"
    synthetic="--model $model --load-format synthetic --kv-cache-dtype bf16 --block-size 128"
    step="--batch 1,4 --context 64 --steps 5" served="--concurrency 1,2 --short 60 --long 200 --output 8 --wave-output 16"
    moved="--lengths 512 --repetitions 3 --transport nixl --chunk-tokens 256"
else
    model=DeepSeek-V4-Flash
    device=cuda yaml=deploy/runs/full_shape.yaml port=8000
    geo="--device cuda --all-reduce nccl one-shot"
    synthetic="--model $model --load-format synthetic"
    step="--batch 1,16,64 --context 1024" served="--bars"
    moved="--lengths 8192,131072 --chunk-tokens 4096 --transport nixl"
fi

step_correctness() {
    limit 470 correctness "$PYTHON" tests/gpu/tensor_parallel.py --processes --ranks "$ranks" $geo \
        --json "$OUT/${name}_correctness.json"
}

step_all_reduce() {
    limit 200 all_reduce "$PYTHON" -m bench.all_reduce --ranks "$ranks" --device $device \
        --json "$OUT/${name}_all_reduce.json"
}

step_step() {
    limit 470 step "$PYTHON" -m deploy.cli bench step $synthetic --device $device --ranks "$ranks" $step \
        --json "$OUT/${name}_step.json" --quiet
}

# serve LABEL RUNS: the cluster of the YAML file, started, measured, ended; ITL of waves beside what `step` has left.
serve() {
    limit 475 "$1" "$PYTHON" -m bench.pair --up $yaml --common "--model $model --prefill-ranks $ranks --decode-ranks $ranks" \
        --port $port $served --runs "$2" --ready 210 --limit 120 --step "$OUT/${name}_step.json" \
        --json "$OUT/${name}_$1.json"
}

step_serve_short() {
    serve serve_short wave,short
}

step_serve_long() {
    serve serve_long ttft,long
}

# All ranks at once: a writer and a receiver for each, as the ranks of a push are. The slowest is what a prompt waits for.
step_transfer() {
    local rank pids="" pid ids=""
    for rank in $(seq 0 $((ranks - 1))); do
        [ -n "$DRY" ] || ids="--device-ids $rank,$((rank + ranks))"
        limit 300 "transfer_$rank" "$PYTHON" -m kv_transfer.bench --device $device $ids $moved \
            --json "$OUT/${name}_transfer_$rank.json" &
        pids="$pids $!"
    done
    for pid in $pids; do
        wait "$pid" || failed=1
    done
}

run_steps "$@"
