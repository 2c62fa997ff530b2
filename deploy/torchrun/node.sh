#!/bin/bash
# One node, as a worker of torchrun (--nproc-per-node 1 --no-python); arguments are flags of `lora-server serve`.
# PORT: of the controller, on the first host; 7400.
set -euo pipefail
controller=$MASTER_ADDR:${PORT:-7400}
own=()
if [ "$GROUP_RANK" = 0 ]; then own=(--listen "$controller"); fi
exec lora-server serve --nodes "$GROUP_WORLD_SIZE" --node-rank "$GROUP_RANK" --controller "$controller" "${own[@]}" "$@"
