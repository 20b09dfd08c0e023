#!/usr/bin/env bash
# The whole single-stream grid on one GPU, in under eight minutes, into one JSON file: bench/gpu.sh [OUT.json]
# Random weights of a real shape, so nothing is downloaded. A step that is over its time is left out and named.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/gpu.json}
kvbaton=${KVBATON:-kvbaton}
methods=dense,full-shared,kvcmas,cacheblend,epic,affine,hybrid
left() { echo $((480 - SECONDS)); }
mkdir -p "$(dirname "$out")"
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT

step() {  # step NAME LIMIT_S ARGS...: one bench, its JSON into $parts
    local name=$1 limit=$2 rest
    shift 2
    rest=$(left)
    if ((rest < 20)); then echo "gpu.sh: $name left out, no time" >&2; return; fi
    echo "gpu.sh: $name, ${rest} s left" >&2
    timeout "$((limit < rest ? limit : rest))" "$kvbaton" bench single --json --device cuda --repeats 3 \
        --out "$parts/$name.jsonl" "$@" > "$parts/$name.json" || { echo "gpu.sh: $name did not finish" >&2; rm -f "$parts/$name.json"; }
}

step length 240 --shape llama-3.1-8b --methods "$methods" --shared 2048,8192,32768 --learn 2
step agents 90 --shape llama-3.1-8b --methods "$methods" --shared 8192 --agents 4,8 --learn 2
step rounds 60 --shape llama-3.1-8b --methods dense,full-shared,kvcmas,hybrid --shared 8192 --rounds 2,4 --learn 2
step pool 60 --shape llama-3.2-1b --methods kvcmas --shared 8192 --vary corrector.pool=1,5,10,20 --learn 20
step rank 60 --shape llama-3.2-1b --methods kvcmas --shared 8192 --vary corrector.rank=8,16,32,64 --learn 10
step budget 60 --shape llama-3.2-1b --methods dense,cacheblend --shared 8192 --vary selector.share=0.05,0.1,0.2,0.4 --learn 1

python3 - "$parts" "$out" <<'PY'
import json, pathlib, sys
parts, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
whole = {p.stem: json.loads(p.read_text()) for p in sorted(parts.glob("*.json"))}
scratch = out.with_suffix(".tmp")
scratch.write_text(json.dumps(whole, indent=1))
scratch.replace(out)
print(f"{out}: {', '.join(whole) or 'nothing finished'}")
PY
