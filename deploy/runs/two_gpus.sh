#!/usr/bin/env bash
# Two GPUs of one host: TP2 against TP1, all-reduces, the whole model's step, and a pair with a GPU for each role.
#
#   deploy/runs/two_gpus.sh                        all steps, each under 8 minutes
#   deploy/runs/two_gpus.sh all_reduce step        some of: correctness all_reduce step pair transfer faults
#   DRY=1 OUT=dry deploy/runs/two_gpus.sh     the same commands on the CPU, tiny
#
# JSON and logs go to $OUT (docs/results). Exit code 1 if a step failed; docs/runs.md says what each leaves.
set -u
name=two_gpus
steps="correctness all_reduce step transfer pair faults"
. "$(dirname "$0")/steps.sh"

if [ -n "$DRY" ]; then
    device=cpu gpus=, ranks=2
    geo="--device cpu --dtype float32 --by inner --lengths 9 --steps 2"
    synthetic="--model tests/oracle/tiny --load-format synthetic --num-layers 3 --kv-cache-dtype bf16 --block-size 128"
    step="--batch 1,4 --context 64 --steps 5" alone=0/2
    role="--dtype float32 --kv-cache-dtype fp32 --block-size 128 --max-num-batched-tokens 128 --kv-cache-memory-gib 0.1"
    pair="--model $("$PYTHON" -m deploy.tiny_model) --concurrency 1,2 --short 60 --long 200 --output 8 --wave-output 24 --fault-prompt 300"
    prefill="--max-num-seqs 4" decode="--max-num-seqs 4" port=18460
    moved="--lengths 512 --repetitions 3 --transport nixl --chunk-tokens 256"
else
    device=cuda gpus=0,1 ranks=2
    geo="--device cuda --all-reduce nccl one-shot"
    synthetic="--model DeepSeek-V4-Flash --load-format synthetic"
    step="--batch 1,16,64 --context 8192" alone=0/4
    role="--load-format synthetic --simulate-rank 0/4 --device cuda --max-model-len 16384"
    pair="--model DeepSeek-V4-Flash --bars"
    prefill="--max-num-seqs 8 --max-num-batched-tokens 4096 --kv-cache-memory-gib 4"
    decode="--max-num-seqs 64 --kv-cache-memory-gib 8" port=8000
    moved="--lengths 8192,131072 --chunk-tokens 4096 --transport nixl"
fi
prefill_gpu=${gpus%,*} decode_gpu=${gpus#*,}

step_correctness() {
    limit 460 correctness "$PYTHON" tests/gpu/tensor_parallel.py --processes --ranks $ranks $geo \
        --json "$OUT/${name}_correctness.json"
}

step_all_reduce() {
    [ -n "$DRY" ] || limit 200 exchange "$PYTHON" tests/gpu/exchange.py --ranks $ranks
    limit 200 all_reduce "$PYTHON" -m bench.all_reduce --ranks $ranks --device $device --json "$OUT/${name}_all_reduce.json"
}

step_step() {
    limit 470 step "$PYTHON" -m deploy.cli bench step $synthetic --device $device --ranks $ranks $step \
        --json "$OUT/${name}_step.json" --quiet
}

step_transfer() {
    local ids=""
    [ -n "$DRY" ] || ids="--device-ids $gpus"
    limit 300 transfer "$PYTHON" -m kv_transfer.bench --device $device $ids $moved --json "$OUT/${name}_transfer.json"
}

# The waves are compared with the engine's step at 1,024 tokens of context, of the same rank alone on the same card.
step_pair() {
    local at="--context 1024"
    [ -n "$DRY" ] && at=""
    CUDA_VISIBLE_DEVICES=$decode_gpu limit 110 engine "$PYTHON" -m deploy.cli bench step $synthetic --device $device \
        --simulate-rank $alone $step $at --json "$OUT/${name}_engine.json" --quiet
    limit 365 pair "$PYTHON" -m bench.pair $pair --common "$role" --prefill "$prefill" --decode "$decode" \
        --prefill-gpus "$prefill_gpu" --decode-gpus "$decode_gpu" --port $port --runs ttft,wave,short,long \
        --limit 90 --ready 150 --step "$OUT/${name}_engine.json" --json "$OUT/${name}_pair.json"
}

step_faults() {
    limit 470 faults "$PYTHON" -m bench.pair $pair --common "$role --test-seams true" --prefill "$prefill" \
        --decode "$decode" --prefill-gpus "$prefill_gpu" --decode-gpus "$decode_gpu" --port $port --runs faults \
        --ready 150 --json "$OUT/${name}_faults.json"
}

run_steps "$@"
