#!/bin/sh
# slurm.sh FOLDER COMMAND...: Slurm on one machine, in namespaces of its own, with deploy/slurm as it is installed there; runs the command.
set -eu
[ "${1-}" = inside ] || exec unshare --net --uts --mount --pid --fork --mount-proc --kill-child "$0" inside "$@"
root=$2
shift 2
mkdir "$root/state" "$root/spool"
hostname localhost
ip link set lo up
# glibc takes no name for an address where there is only loopback.
ip link add slurm0 type bridge
ip address add 10.99.0.1/24 dev slurm0
ip link set slurm0 up
head -c 1024 /dev/urandom > "$root/munge.key"
chmod 600 "$root/munge.key"
cat - "$root/hooks.conf" > "$root/slurm.conf" <<END
ClusterName=test
SlurmctldHost=localhost(10.99.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$root/munge.socket
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/spool
SlurmctldPidFile=$root/slurmctld.pid
SlurmdPidFile=$root/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
NodeName=localhost CPUs=4 NodeAddr=10.99.0.1
PartitionName=all Nodes=ALL Default=YES
SlurmdParameters=config_overrides
END
export SLURM_CONF="$root/slurm.conf"
munged --force -F --key-file="$root/munge.key" --socket="$root/munge.socket" --pid-file="$root/munge.pid" \
    --log-file="$root/munge.log" --seed-file="$root/munge.seed" > "$root/munge.out" 2>&1 &
slurmctld -D > "$root/slurmctld.log" 2>&1 &
for _ in $(seq 50); do
    [ -e "$root/munge.socket" ] && sinfo > "$root/sinfo" 2>&1 && break
    sleep 0.2
done
slurmd -D -N localhost > "$root/slurmd.log" 2>&1 &
for _ in $(seq 100); do
    sinfo --noheader -o %T | grep -q idle && break
    sleep 0.2
done
status=0
timeout 60 "$@" || status=$?
# The job's end is told to its scripts a little later.
for _ in $(seq 50); do
    [ -n "$(squeue --noheader)" ] || break
    sleep 0.2
done
sleep 1
exit $status
