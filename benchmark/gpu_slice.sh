#!/usr/bin/env bash
# One call on a CUDA host: writes a dummy model of real shape, runs the next missing slices of a set (or measures the
# bound, or the encoder's SM modes), packs what was written into OUT_DIR, and prints a table last.
#   gpu_slice.sh OUT_DIR TOKENIZER_DIR MODEL RESULTS_DIR bound|modes|timeline|headline|SET|- [more flags]
# MODEL is a name of dummy_model.py, e.g. qwen2-vl-7b. With `-` give --arms and --workloads. PYTHON names the interpreter.
set -euo pipefail
out=$1 tokenizer=$2 model=$3 results=$4 what=$5
shift 5
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH=$here/../python${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
model_dir=$(mktemp -d)/$model
mkdir -p "$out" "$results"
"$python" "$here/dummy_model.py" "$model" "$model_dir" --tokenizer "$tokenizer"
sized="--max-total-tokens ${MAX_TOTAL_TOKENS:-300000} --mem-fraction-static 0.85"
common=(--model "$model_dir" --model-name "$model" --results "$results" --common-flags "--load-format dummy")
case $what in
bound)
  status=0
  "$python" "$here/bound.py" measure "${common[@]}" "$@" || status=$?
  tar czf "$out/bound.tgz" -C "$results" bounds
  exit "$status"
  ;;
modes)
  # SIS against static splits on a load that changes, all on one server: see sm_modes.py. OUT_DIR gets the passes.
  exec "$python" "$here/sm_modes.py" measure --model "$model_dir" --model-name "$model" --out "$results/sm-modes-$model" \
    --common-flags "--load-format dummy" --bundle "$out/sm-modes.tgz" --log-dir "$out/logs" "$@"
  ;;
timeline)
  exec "$python" "$here/timeline_record.py" --model "$model_dir" --out "$out/timeline" --common-flags \
    "--load-format dummy" "$@"
  ;;
-) ;;
headline)
  # All arms' servers at once: every KV cache has the same size, and the slack that each leaves free is small.
  common+=(--together --start-estimate-s 90 --start-timeout-s 240)
  set -- --set headline --ours-flags "$sized" --stock-flags "$sized" "$@"
  ;;
*) set -- --set "$what" "$@" ;;
esac
exec "$python" "$here/serve_bench.py" run "${common[@]}" --bundle "$out/slices.tgz" --log-dir "$out/logs" "$@"
