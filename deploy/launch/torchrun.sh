#!/bin/sh
# torchrun.sh HOSTS THIS PROGRAM...: on each host, THIS from 0. MASTER_ADDR is the first one's address.
set -eu
hosts=$1 this=$2
shift 2
# The same as torchrun, by the Python that has netsum.
exec python3 -m torch.distributed.run --nnodes "$hosts" --node_rank "$this" --nproc_per_node "${PER_HOST:-1}" \
    --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}" "$@"
