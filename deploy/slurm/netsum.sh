#!/bin/sh
# Slurm's PrologSlurmctld, EpilogSlurmctld, Prolog, Epilog and TaskProlog in one. A job that is started with --comment=netsum has a job
# slurm-NUMBER on the box while it runs, and its tasks are told of it. Beside this file is netsum.env.
set -eu
PATH=/usr/sbin:/usr/bin:/sbin:/bin
here=$(dirname "$0")
# shellcheck source-path=SCRIPTDIR source=netsum.env
. "$here/netsum.env"

# Nobody without the secret knows the token of another job. Without a secret everybody would.
token() {
    if ! grep -q '[^[:space:]]' "$SECRET"; then
        why="no secret in $SECRET: job $SLURM_JOB_ID has no box"
        echo "$why" >&2
        logger -t netsum-slurm "$why" || :
        return 1
    fi
    { cat "$SECRET" && echo "$SLURM_JOB_ID" && cat "$SECRET"; } | sha256sum | cut -c1-32
}

# The task prolog is not told of the comment.
[ "$SLURM_SCRIPT_CONTEXT" = prolog_task ] || [ "${SLURM_JOB_COMMENT-}" = netsum ] || exit 0

# What fails here does not end a job: Slurm would start it over and over, or take the node out. It runs without a box.
case $SLURM_SCRIPT_CONTEXT in
prolog_slurmctld)
    token=$(token) || exit 0
    ranks=$(scontrol show job -o "$SLURM_JOB_ID" | sed -n 's/.* NumTasks=\([0-9]*\).*/\1/p')
    # Arguments are for all to see.
    echo "$token" | $NETSUM job create "slurm-$SLURM_JOB_ID" --ranks "$ranks" --token - 2>&1 | logger -t netsum-slurm || :
    ;;
epilog_slurmctld)
    $NETSUM job delete "slurm-$SLURM_JOB_ID" 2>&1 | logger -t netsum-slurm || :
    ;;
prolog_slurmd)
    token=$(token) || exit 0
    # The task prolog is run by the user, who does not see the secret.
    mkdir -p "$TOKENS"
    chmod 711 "$TOKENS"
    umask 077
    echo "$token" > "$TOKENS/$SLURM_JOB_ID"
    chown "$SLURM_JOB_UID" "$TOKENS/$SLURM_JOB_ID"
    ;;
epilog_slurmd)
    rm -f "$TOKENS/$SLURM_JOB_ID"
    ;;
prolog_task)
    # Other jobs have no token, and sum by themselves.
    [ -z "${NETSUM_JOB-}" ] && [ -e "$TOKENS/$SLURM_JOB_ID" ] || exit 0
    echo "export NETSUM_CONTROLLER=$CONTROLLER"
    echo "export NETSUM_JOB=slurm-$SLURM_JOB_ID"
    echo "export NETSUM_TOKEN=$(cat "$TOKENS/$SLURM_JOB_ID")"
    ;;
esac
