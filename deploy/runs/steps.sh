# What the run scripts share; sourced by them. Each step is a function step_NAME; its commands run one after the other,
# each under `limit`, and leave their output beside the JSON. See docs/runs.md.

DRY=${DRY:-}
PYTHON=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root" || exit 1
OUT=${OUT:-docs/results}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
failed=0

# limit SECONDS LABEL COMMAND...: run it, print one line with its outcome, and remember a failure. What an earlier run
# has left at its --json is removed: it must not be judged in this one's place.
limit() {
    local seconds=$1 label=$2 log began code word before=""
    shift 2
    for word in "$@"; do
        [ "$before" != --json ] || rm -f "$word"
        before=$word
    done
    log="$OUT/$name.$label.log"
    began=$(date +%s)
    timeout -k 60 "$seconds" "$@" >"$log" 2>&1
    code=$?
    if [ "$code" -eq 0 ]; then
        echo "ok     $name $label: $(($(date +%s) - began)) s; $(tail -n 1 "$log" | cut -c1-160)"
    else
        failed=1
        echo "FAILED $name $label: code $code after $(($(date +%s) - began)) s; $log ends: $(tail -n 3 "$log" | tr '\n' ' ' | cut -c1-400)"
    fi
    return "$code"
}

# judge KIND=LABEL...: hold the reports NAME_LABEL.json against their bars (bench.bars): a table, and a failure for what
# is not met. In a dry run figures of time are only shown.
judge() {
    local each reports=()
    for each in "$@"; do
        reports+=("${each%%=*}=$OUT/${name}_${each#*=}.json")
    done
    "$PYTHON" -m bench.bars ${DRY:+--dry} "${reports[@]}" || failed=1
}

# run_steps WANTED...: those steps, or all of $steps; the others still run if one fails.
run_steps() {
    [ $# -gt 0 ] || set -- $steps
    local each
    for each in "$@"; do
        case " $steps " in
        *" $each "*) "step_$each" ;;
        *) echo "$name.sh $each: no such step; wanted some of: $steps" >&2; exit 2 ;;
        esac
    done
    exit "$failed"
}
