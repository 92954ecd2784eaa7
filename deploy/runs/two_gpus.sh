#!/usr/bin/env bash
# Two GPUs of one host: TP2 against TP1, all-reduces, the whole model's step, and a pair with a GPU for each role.
#
#   deploy/runs/two_gpus.sh                        all steps, each under 8 minutes
#   deploy/runs/two_gpus.sh all_reduce step        some of: correctness all_reduce step transfer pair longest faults
#   DRY=1 OUT=dry deploy/runs/two_gpus.sh     the same commands on the CPU, tiny
#
# JSON and logs go to $OUT (docs/results). Exit code 1 if a step failed or missed a bar; docs/runs.md says what each leaves.
set -u
name=two_gpus
steps="correctness all_reduce step transfer pair longest faults"
. "$(dirname "$0")/steps.sh"

if [ -n "$DRY" ]; then
    device=cpu gpus=, ranks=2
    geo="--device cpu --dtype float32 --by inner --lengths 9 --steps 2"
    synthetic="--model tests/oracle/tiny --load-format synthetic --num-layers 3 --kv-cache-dtype bf16 --block-size 128"
    step="--batch 1,4 --context 64 --steps 5" alone=0/2
    role="--dtype float32 --kv-cache-dtype fp32 --block-size 128 --max-num-batched-tokens 128 --kv-cache-memory-gib 0.1"
    pair="--model $("$PYTHON" -m deploy.tiny_model) --concurrency 1,2 --short 60 --long 200 --output 8 --wave-output 24 --fault-prompt 300"
    length="" very_long="" longest="--longest 1000 --longest-output 8"
    push="--prompt 512 --chunk-tokens 256 --prompts 2 --rounds 2 --peer-device 0"
    prefill="--max-num-seqs 4" decode="--max-num-seqs 4" port=18460
    moved="--lengths 512 --repetitions 3 --transport nixl --chunk-tokens 256"
else
    device=cuda gpus=0,1 ranks=2
    geo="--device cuda --all-reduce nccl one-shot"
    synthetic="--model DeepSeek-V4-Flash --load-format synthetic"
    step="--batch 1,16,64 --context 8192" alone=0/4
    role="--load-format synthetic --simulate-rank 0/4 --device cuda"
    length="--max-model-len 16384" very_long="--max-model-len 131584" longest=""
    push="--prompt 8192 --chunk-tokens 4096 --prompts 8 --rounds 5 --peer-device 1"
    pair="--model DeepSeek-V4-Flash"
    prefill="--max-num-seqs 8 --max-num-batched-tokens 4096 --kv-cache-memory-gib 4"
    decode="--max-num-seqs 64 --kv-cache-memory-gib 8" port=8000
    moved="--lengths 8192,131072 --chunk-tokens 4096 --transport nixl"
fi
prefill_gpu=${gpus%,*} decode_gpu=${gpus#*,}

# started LABEL SECONDS FLAGS RUNS MORE...: a pair with a GPU for each role, measured, ended, judged.
started() {
    local label=$1 seconds=$2 flags=$3 runs=$4
    shift 4
    limit "$seconds" "$label" "$PYTHON" -m bench.pair $pair --common "$flags" --prefill "$prefill" --decode "$decode" \
        --prefill-gpus "$prefill_gpu" --decode-gpus "$decode_gpu" --port $port --ready 150 --runs "$runs" "$@" \
        --json "$OUT/${name}_$label.json"
    judge pair="$label"
}

step_correctness() {
    limit 460 correctness "$PYTHON" tests/gpu/tensor_parallel.py --processes --ranks $ranks $geo \
        --json "$OUT/${name}_correctness.json"
    judge correctness=correctness
}

step_all_reduce() {
    [ -n "$DRY" ] || limit 200 exchange "$PYTHON" tests/gpu/exchange.py --ranks $ranks
    limit 200 all_reduce "$PYTHON" -m bench.all_reduce --ranks $ranks --device $device --json "$OUT/${name}_all_reduce.json"
    judge all_reduce=all_reduce
}

step_step() {
    limit 470 step "$PYTHON" -m deploy.cli bench step $synthetic --device $device --ranks $ranks $step \
        --json "$OUT/${name}_step.json" --quiet
    judge step=step
}

# What moves the cache alone, and then what its pushes cost the prefill beside them, on the shapes of a rank of four.
step_transfer() {
    local ids=""
    [ -n "$DRY" ] || ids="--device-ids $gpus"
    limit 300 transfer "$PYTHON" -m kv_transfer.bench --device $device $ids $moved --json "$OUT/${name}_transfer.json"
    limit 300 push "$PYTHON" -m bench.push $synthetic --device $device --simulate-rank $alone $push \
        --json "$OUT/${name}_push.json"
    judge transfer=transfer push=push
}

# The waves are compared with the engine's step at 1,024 tokens of context, of the same rank alone on the same card.
step_pair() {
    local at="--context 1024"
    [ -n "$DRY" ] && at=""
    CUDA_VISIBLE_DEVICES=$decode_gpu limit 110 engine "$PYTHON" -m deploy.cli bench step $synthetic --device $device \
        --simulate-rank $alone $step $at --json "$OUT/${name}_engine.json" --quiet
    started pair 365 "$role $length" ttft,wave,short,long --limit 90 --step "$OUT/${name}_engine.json"
}

# Prompts of 128k, one and four at a time.
step_longest() {
    started longest 470 "$role $very_long" longest $longest --limit 150
}

step_faults() {
    started faults 470 "$role $length --test-seams true" faults
}

run_steps "$@"
