#!/bin/sh
# mpirun.sh HOST:RANKS,HOST:RANKS... PROGRAM...: run it on one host, which reaches the others by
# ssh.
set -eu
hosts=$1
shift
exec mpirun --host "$hosts" -x NETSUM_CONTROLLER -x NETSUM_JOB -x NETSUM_TOKEN python3 "$@"
