#!/bin/sh
# Compiles the operations for the processor that the container runs on (20 s once; keep ~/.cache in a volume), then runs ridgeline.
# Without them a server works, slower: COMPILE_CPU_OPERATIONS=0 skips this, for servers on GPUs.
set -eu
if [ "${COMPILE_CPU_OPERATIONS:-1}" = 1 ]; then
    python -m ridgeline.ops.native.build || true
fi
exec ridgeline "$@"
