// Operations in flight. They complete in the order of their calls on a communicator, within MPI's
// functions that wait or test, which needs no level of thread support.

#include "requests.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// netsum's own limit, beyond which its calls block.
#define MOST_STARTED 64
// Seconds between looks at MPI's own messages.
#define SLICE 100e-6

// A call in flight.
struct op {
    struct call call;
    struct group *group;
    struct op *next;
    netsum_work *work;
    // Why netsum refused to start it.
    netsum_status status;
    char *refusal;
    // The same operation by MPI.
    MPI_Request retry;
    // MPI_REQUEST_NULL for a blocking call.
    MPI_Request request;
    // MPI's error code.
    int code;
    bool done;
    // The queue, and MPI's request, which MPICH 4.0.2 may drop before the operation ends.
    int holders;
    // A thread waits for `work` without the lock.
    bool busy;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct group *groups;
// Operations of all groups that have not ended, and groups that leave.
static int in_flight, leaving;
// Its request never ends, so that asking for it makes MPI work on messages.
static struct op never = {.holders = 2};
// An operation's error that its request has reported to MPI, and whose handler gets it.
static _Thread_local int failure;
static _Thread_local MPI_Comm failed_comm;

struct group *netsum_mpi_add(MPI_Comm comm) {
    struct group *group = malloc(sizeof *group);
    if (!group) abort();
    pthread_mutex_lock(&lock);
    *group = (struct group){.comm = comm, .own = MPI_COMM_NULL, .next = groups};
    groups = group;
    pthread_mutex_unlock(&lock);
    return group;
}

// An error code with this text.
static int code_of(netsum_status status, const char *reason) {
    static int class, codes[NETSUM_ERROR_INTERNAL + 1];
    char text[MPI_MAX_ERROR_STRING];
    snprintf(text, sizeof text, "netsum: %s", reason);
    if (!class && PMPI_Add_error_class(&class) == MPI_SUCCESS)
        PMPI_Add_error_string(class, "netsum");
    if (!codes[status]) PMPI_Add_error_code(class, &codes[status]);
    PMPI_Add_error_string(codes[status], text);
    return codes[status];
}

static void issue(struct op *op) {
    op->status = netsum_mpi_issue(op->group->net, &op->call, &op->work);
    if (op->status) op->refusal = strdup(netsum_error_text());
}

// Starts operations when netsum has room for them, for ranks that are in MPI's own functions. Calls
// only netsum, since MPI may not support threads.
static void *start_waiting(void *of) {
    struct group *group = of;
    pthread_mutex_lock(&lock);
    while (group->waiting) {
        struct op *op = group->waiting;
        pthread_mutex_unlock(&lock);
        issue(op);
        pthread_mutex_lock(&lock);
        group->waiting = op->next;
    }
    group->starting = false;
    pthread_mutex_unlock(&lock);
    return NULL;
}

// Whether the oldest operation has come to its end.
static bool has_ended(struct group *group, struct op *op) {
    bool done = false;
    if (op == group->waiting || op->busy) return false;
    if (op->work) {
        netsum_test(op->work, &done);
        if (!done) return false;
        netsum_status status = netsum_wait(op->work, NULL);
        op->work = NULL;
        if (status == NETSUM_ERROR_NON_FINITE)
            op->code = netsum_mpi_retry(&op->call, group->own, &op->retry);
        else if (status)
            op->code = code_of(status, netsum_error_text());
    } else if (op->status) {
        op->code = code_of(op->status, op->refusal);
    }
    if (op->retry != MPI_REQUEST_NULL && !op->code) {
        int complete = 0;
        op->code = PMPI_Test(&op->retry, &complete, MPI_STATUS_IGNORE);
        return complete || op->code;
    }
    return true;
}

static void drop(struct op *op) {
    if (__atomic_sub_fetch(&op->holders, 1, __ATOMIC_ACQ_REL)) return;
    __atomic_sub_fetch(&op->group->requests, 1, __ATOMIC_RELEASE);
    free(op);
}

static void advance(struct group *group) {
    while (group->first && has_ended(group, group->first)) {
        struct op *op = group->first;
        group->first = op->next;
        group->operations--;
        __atomic_sub_fetch(&in_flight, 1, __ATOMIC_RELEASE);
        netsum_mpi_finish(&op->call, group->own, !op->code);
        free(op->refusal);
        if (op->request != MPI_REQUEST_NULL) {
            PMPI_Grequest_complete(op->request);
            drop(op);
        } else {
            // Its thread may return now, and the operation is on its stack.
            __atomic_store_n(&op->done, true, __ATOMIC_RELEASE);
        }
    }
}

// Also leaves one group that nothing needs any more.
static void advance_all(void) {
    struct group *group, **at = &groups;
    pthread_mutex_lock(&lock);
    for (; (group = *at); at = &group->next) {
        advance(group);
        if (group->leaving && !group->first && !group->starting &&
            !__atomic_load_n(&group->requests, __ATOMIC_ACQUIRE))
            break;
    }
    if (group) *at = group->next;
    pthread_mutex_unlock(&lock);
    if (!group) return;
    __atomic_sub_fetch(&leaving, 1, __ATOMIC_RELEASE);
    if (group->own != MPI_COMM_NULL) PMPI_Comm_free(&group->own);
    netsum_finalize(group->net);
    free(group);
}

bool netsum_mpi_progress(void) {
    if (__atomic_load_n(&in_flight, __ATOMIC_ACQUIRE) || __atomic_load_n(&leaving, __ATOMIC_ACQUIRE))
        advance_all();
    return __atomic_load_n(&in_flight, __ATOMIC_ACQUIRE);
}

void netsum_mpi_doze(void) {
    struct op *op = NULL;
    bool done;
    int flag;
    // Other ranks may need messages of this one to come as far.
    PMPI_Request_get_status(never.request, &flag, MPI_STATUS_IGNORE);
    pthread_mutex_lock(&lock);
    for (struct group *group = groups; group && !op; group = group->next)
        if (group->first != group->waiting && group->first->work && !group->first->busy)
            op = group->first;
    if (op) op->busy = true;
    pthread_mutex_unlock(&lock);
    if (!op) {
        nanosleep(&(struct timespec){.tv_nsec = (long)(SLICE * 1e9)}, NULL);
        return;
    }
    netsum_wait_for(op->work, SLICE, &done);
    pthread_mutex_lock(&lock);
    op->busy = false;
    pthread_mutex_unlock(&lock);
}

static void append(struct group *group, struct op *op) {
    op->group = group;
    op->retry = MPI_REQUEST_NULL;
    netsum_mpi_count(&op->call, true);
    pthread_mutex_lock(&lock);
    __atomic_add_fetch(&in_flight, 1, __ATOMIC_RELEASE);
    netsum_mpi_prepare(&op->call, op->request == MPI_REQUEST_NULL && !group->first);
    if (group->first) group->last->next = op;
    else group->first = op;
    group->last = op;
    if (++group->operations <= MOST_STARTED && !group->waiting) {
        issue(op);
    } else if (!group->waiting) {
        group->waiting = op;
        pthread_t thread;
        if (!group->starting && pthread_create(&thread, NULL, start_waiting, group)) abort();
        if (!group->starting) pthread_detach(thread);
        group->starting = true;
    }
    pthread_mutex_unlock(&lock);
}

static int query(void *state, MPI_Status *status) {
    struct op *op = state;
    PMPI_Status_set_elements(status, MPI_BYTE, 0);
    PMPI_Status_set_cancelled(status, 0);
    status->MPI_SOURCE = MPI_UNDEFINED;
    status->MPI_TAG = MPI_UNDEFINED;
    // Open MPI would call the handler of MPI_COMM_WORLD: netsum_mpi_outcome() calls the
    // communicator's.
    status->MPI_ERROR = MPI_SUCCESS;
    if (op->code) {
        failure = op->code;
        failed_comm = op->group->comm;
    }
    return MPI_SUCCESS;
}

int netsum_mpi_outcome(int error) {
    if (!error && failure) {
        error = failure;
        PMPI_Comm_call_errhandler(failed_comm, error);
    }
    failure = 0;
    return error;
}

static int forget(void *state) {
    drop(state);
    return MPI_SUCCESS;
}

static int cancel(void *state, int complete) {
    (void)state, (void)complete;
    return MPI_SUCCESS;
}

void netsum_mpi_begin(void) {
    PMPI_Grequest_start(query, forget, cancel, &never, &never.request);
}

int netsum_mpi_run(struct group *group, const struct call *call) {
    struct op op = {.call = *call, .request = MPI_REQUEST_NULL};
    append(group, &op);
    while (netsum_mpi_progress(), !__atomic_load_n(&op.done, __ATOMIC_ACQUIRE)) netsum_mpi_doze();
    if (op.code) PMPI_Comm_call_errhandler(group->comm, op.code);
    return op.code;
}

int netsum_mpi_start(struct group *group, const struct call *call, MPI_Request *request) {
    struct op *op = calloc(1, sizeof *op);
    if (!op) abort();
    op->call = *call;
    op->holders = 2;
    int error = PMPI_Grequest_start(query, forget, cancel, op, &op->request);
    if (error) {
        free(op);
        return error;
    }
    *request = op->request;
    __atomic_add_fetch(&group->requests, 1, __ATOMIC_RELAXED);
    append(group, op);
    return MPI_SUCCESS;
}

static void release(struct group *group) {
    group->leaving = true;
    __atomic_add_fetch(&leaving, 1, __ATOMIC_RELEASE);
}

void netsum_mpi_freed(MPI_Comm comm) {
    pthread_mutex_lock(&lock);
    for (struct group *group = groups; group; group = group->next) {
        if (group->comm != comm) continue;
        if (group->own != MPI_COMM_NULL) {
            MPI_Errhandler handler;
            PMPI_Comm_get_errhandler(comm, &handler);
            PMPI_Comm_set_errhandler(group->own, handler);
            PMPI_Errhandler_free(&handler);
        }
        group->comm = group->own;
        if (!group->persistent || group->idle) release(group);
    }
    pthread_mutex_unlock(&lock);
    advance_all();
}

void netsum_mpi_idle(struct group *group) {
    pthread_mutex_lock(&lock);
    group->idle = true;
    if (group->comm == group->own) release(group);
    pthread_mutex_unlock(&lock);
}

struct group *netsum_mpi_persistent(MPI_Comm comm, int number) {
    struct group *group;
    pthread_mutex_lock(&lock);
    for (group = groups; group; group = group->next)
        if (group->comm == comm && group->persistent && !number--) break;
    pthread_mutex_unlock(&lock);
    return group;
}

void netsum_mpi_leave(void) {
    PMPI_Grequest_complete(never.request);
    PMPI_Wait(&never.request, MPI_STATUS_IGNORE);
    for (struct group *group = groups; group; group = group->next) {
        netsum_finalize(group->net);
        group->net = NULL;
        // MPI's end frees it.
        group->own = MPI_COMM_NULL;
    }
}
