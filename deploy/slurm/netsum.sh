#!/bin/sh
# Slurm's PrologSlurmctld, EpilogSlurmctld, Prolog, Epilog and TaskProlog in one. A job that is
# started with --comment=netsum has a job slurm-NUMBER on the box while it runs, and its tasks get
# that job's settings. netsum.env is in the same folder.
set -eu
PATH=/usr/sbin:/usr/bin:/sbin:/bin
here=$(dirname "$0")
# shellcheck source-path=SCRIPTDIR source=netsum.env
. "$here/netsum.env"

# Tokens of other jobs cannot be guessed without the secret, so an empty secret is refused.
token() {
    if ! grep -q '[^[:space:]]' "$SECRET"; then
        why="no secret in $SECRET: job $SLURM_JOB_ID has no box"
        echo "$why" >&2
        logger -t netsum-slurm "$why" || :
        return 1
    fi
    { cat "$SECRET" && echo "$SLURM_JOB_ID" && cat "$SECRET"; } | sha256sum | cut -c1-32
}

# Slurm does not give the comment to the task prolog.
[ "$SLURM_SCRIPT_CONTEXT" = prolog_task ] || [ "${SLURM_JOB_COMMENT-}" = netsum ] || exit 0

# A failure here must not end the job, as Slurm would start it over and over, or drain the node. The
# job then runs without a box.
case $SLURM_SCRIPT_CONTEXT in
prolog_slurmctld)
    token=$(token) || exit 0
    ranks=$(scontrol show job -o "$SLURM_JOB_ID" | sed -n 's/.* NumTasks=\([0-9]*\).*/\1/p')
    # The token is not an argument, because every user can see those.
    echo "$token" | $NETSUM job create "slurm-$SLURM_JOB_ID" --ranks "$ranks" --token - 2>&1 | logger -t netsum-slurm || :
    ;;
epilog_slurmctld)
    $NETSUM job delete "slurm-$SLURM_JOB_ID" 2>&1 | logger -t netsum-slurm || :
    ;;
prolog_slurmd)
    token=$(token) || exit 0
    # The user runs the task prolog, and cannot read the secret.
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
    # Other jobs have no token file, and their ranks sum over the hosts' ring.
    [ -z "${NETSUM_JOB-}" ] && [ -e "$TOKENS/$SLURM_JOB_ID" ] || exit 0
    echo "export NETSUM_CONTROLLER=$CONTROLLER"
    echo "export NETSUM_JOB=slurm-$SLURM_JOB_ID"
    echo "export NETSUM_TOKEN=$(cat "$TOKENS/$SLURM_JOB_ID")"
    ;;
esac
