#!/usr/bin/env bash
# The full shape on eight GPUs of one host: TP4 prefill + TP4 decode of the whole model, by `isthmus up`.
#
#   deploy/runs/full_shape.sh                          all steps, each under 8 minutes
#   deploy/runs/full_shape.sh serve_short transfer     some of: correctness served all_reduce step serve_short serve_long
#                                                      serve_longest transfer
#   RANKS=2 deploy/runs/full_shape.sh                  TP2 + TP2 on four GPUs
#   DRY=1 OUT=dry deploy/runs/full_shape.sh       the same commands on the CPU, TP4 + TP4 of the tiny model
#
# JSON, HTML and logs go to $OUT (docs/results). Exit code 1 if a step failed or missed a bar; docs/runs.md says what each leaves.
set -u
name=full_shape
steps="correctness served all_reduce step serve_short serve_long serve_longest transfer"
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

# six_layers FOLDER: a checkpoint of the first layers, every kind among them, for all groups to load; no tokenizer.
six_layers() {
    if [ -z "$DRY" ]; then
        limit 120 synthesize "$PYTHON" -m deploy.cli model synthesize "$1" --like v4-flash --layers 6 --experts nvfp4
        return
    fi
    "$PYTHON" - "$1" <<'END'
import pathlib, sys
from deploy.model_synthesize import synthesize
from deploy.synthetic_checkpoint import make_config
config = make_config("tiny", layers=0, experts="nvfp4", has_mtp=False) | {"o_groups": 4, "moe_intermediate_size": 64}
synthesize(pathlib.Path(sys.argv[1]), config, "nvfp4", say=lambda text: None)
END
}

if [ -n "$DRY" ]; then
    model=$OUT/tiny-four-groups
    four_groups "$model" || exit 1
    device=cpu yaml=deploy/runs/full_shape_dry.yaml port=18470
    geo="--device cpu --dtype float32 --by expert --lengths 9 --steps 1"
    synthetic="--model $model --load-format synthetic --kv-cache-dtype bf16 --block-size 128"
    step="--batch 1,4 --context 64 --steps 5" served="--concurrency 1,2 --short 60 --long 200 --output 8 --wave-output 16"
    served="$served --longest 1000 --longest-output 8" very_long=""
    dtypes=float32 asked="--answer-prompts 40,300 --answer-output 8"
    one="--kv-cache-dtype fp32 --block-size 128 --chunk-tokens 128"
    moved="--lengths 512 --repetitions 3 --transport nixl --chunk-tokens 256"
else
    model=DeepSeek-V4-Flash
    device=cuda yaml=deploy/runs/full_shape.yaml port=8000
    geo="--device cuda --all-reduce nccl one-shot"
    synthetic="--model $model --load-format synthetic"
    step="--batch 1,16,64 --context 1024" served="" very_long="--max-model-len 131584"
    dtypes="bfloat16 float32" asked="" one="--kv-cache-dtype packed --index-cache-dtype fp8 --chunk-tokens 4096"
    moved="--lengths 8192,131072 --chunk-tokens 4096 --transport nixl"
fi

step_correctness() {
    limit 470 correctness "$PYTHON" tests/gpu/tensor_parallel.py --processes --ranks "$ranks" $geo \
        --json "$OUT/${name}_correctness.json"
    judge correctness=correctness
}

# The served cluster against one rank of the same checkpoint: prompts that are short, over a window and of two chunks.
# In bfloat16 as it is served, and in float32, where more than rounding shows.
step_served() {
    local folder dtype
    folder=$(mktemp -d) || { failed=1; return; }
    six_layers "$folder/model" || failed=1
    for dtype in $dtypes; do
        limit 330 "served_$dtype" "$PYTHON" -m bench.pair --up $yaml --port $port --runs answers $asked --ready 210 \
            --common "--model $folder/model --load-format auto --dtype $dtype --prefill-ranks $ranks --decode-ranks $ranks" \
            --json "$OUT/${name}_served_$dtype.json"
        limit 240 "answers_$dtype" "$PYTHON" -m bench.answers --answers "$OUT/${name}_served_$dtype.json" \
            --model "$folder/model" --device $device --dtype $dtype $one --json "$OUT/${name}_answers_$dtype.json"
        judge pair="served_$dtype" answers="answers_$dtype"
    done
    rm -rf "$folder"
}

step_all_reduce() {
    limit 200 all_reduce "$PYTHON" -m bench.all_reduce --ranks "$ranks" --device $device \
        --json "$OUT/${name}_all_reduce.json"
    judge all_reduce=all_reduce
}

step_step() {
    limit 470 step "$PYTHON" -m deploy.cli bench step $synthetic --device $device --ranks "$ranks" $step \
        --json "$OUT/${name}_step.json" --quiet
    judge step=step
}

# serve LABEL RUNS LIMIT FLAGS: the cluster of the YAML file, started, measured, ended, judged; ITL of waves beside what
# `step` has left. LIMIT: seconds of a run.
serve() {
    limit 475 "$1" "$PYTHON" -m bench.pair --up $yaml --port $port $served --runs "$2" --ready 210 --limit "$3" \
        --common "--model $model --prefill-ranks $ranks --decode-ranks $ranks $4" \
        --step "$OUT/${name}_step.json" --json "$OUT/${name}_$1.json"
    judge pair="$1"
}

step_serve_short() {
    serve serve_short wave,short 120 ""
}

step_serve_long() {
    serve serve_long ttft,long 120 ""
}

step_serve_longest() {
    serve serve_longest longest 170 "$very_long"
}

# All ranks at once: a writer and a receiver for each, as the ranks of a push are. The slowest is what a prompt waits for.
step_transfer() {
    local rank pids="" pid ids="" reports=""
    for rank in $(seq 0 $((ranks - 1))); do
        [ -n "$DRY" ] || ids="--device-ids $rank,$((rank + ranks))"
        limit 300 "transfer_$rank" "$PYTHON" -m kv_transfer.bench --device $device $ids $moved \
            --json "$OUT/${name}_transfer_$rank.json" &
        pids="$pids $!" reports="$reports transfer=transfer_$rank"
    done
    for pid in $pids; do
        wait "$pid" || failed=1
    done
    judge $reports
}

run_steps "$@"
