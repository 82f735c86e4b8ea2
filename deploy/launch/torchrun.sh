#!/bin/sh
# torchrun.sh HOSTS THIS PROGRAM...: run it on each host. THIS counts hosts from 0, and MASTER_ADDR
# is the first host's address.
set -eu
hosts=$1 this=$2
shift 2
# The same as torchrun, with the Python that has netsum.
exec python3 -m torch.distributed.run --nnodes "$hosts" --node_rank "$this" --nproc_per_node "${PER_HOST:-1}" \
    --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}" "$@"
