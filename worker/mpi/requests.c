// Operations in flight. They complete in the order of their calls on a communicator, within MPI's
// functions that wait or test, which need no thread of their own and no level of thread support.

#include "plugin.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

// netsum's own limit, beyond which its calls block.
#define MOST_STARTED 64
// Seconds between looks at MPI's own messages.
#define SLICE 100e-6

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct group *groups;
// Operations of all groups that have not ended.
static int in_flight;
// Its request never ends, so that asking for it makes MPI work on messages.
static struct op never = {.holders = 2};
static _Thread_local int failure;
static _Thread_local MPI_Comm failed_comm;

void netsum_mpi_add(struct group *group) {
    pthread_mutex_lock(&lock);
    group->own = MPI_COMM_NULL;
    group->next = groups;
    groups = group;
    pthread_mutex_unlock(&lock);
}

// Starts the operations that there is room for.
static void start_waiting(struct group *group) {
    while (group->waiting && group->started < MOST_STARTED) {
        struct op *op = group->waiting;
        netsum_status status = netsum_mpi_issue(group->net, &op->call, &op->work);
        if (status) op->code = netsum_mpi_code(status);
        group->started++;
        group->waiting = op->next;
    }
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
            op->code = netsum_mpi_code(status);
    }
    if (op->retry != MPI_REQUEST_NULL && !op->code) {
        int complete = 0;
        op->code = PMPI_Test(&op->retry, &complete, MPI_STATUS_IGNORE);
        return complete || op->code;
    }
    return true;
}

static void drop(struct op *op) {
    if (!__atomic_sub_fetch(&op->holders, 1, __ATOMIC_ACQ_REL)) free(op);
}

static void advance(struct group *group) {
    start_waiting(group);
    while (group->first && has_ended(group, group->first)) {
        struct op *op = group->first;
        group->first = op->next;
        group->started--;
        __atomic_sub_fetch(&in_flight, 1, __ATOMIC_RELEASE);
        netsum_mpi_finish(&op->call, group->own, !op->code);
        op->comm = group->freed ? MPI_COMM_WORLD : group->comm;
        if (op->request != MPI_REQUEST_NULL) {
            PMPI_Grequest_complete(op->request);
            drop(op);
        } else {
            // Its thread may return now, and the operation is on its stack.
            __atomic_store_n(&op->done, true, __ATOMIC_RELEASE);
        }
        start_waiting(group);
    }
}

static void advance_all(void) {
    struct group *ended = NULL;
    pthread_mutex_lock(&lock);
    for (struct group **at = &groups, *group; (group = *at);) {
        advance(group);
        if (group->freed && !group->first) {
            *at = group->next;
            group->next = ended;
            ended = group;
        } else {
            at = &group->next;
        }
    }
    pthread_mutex_unlock(&lock);
    while (ended) {
        struct group *group = ended;
        ended = group->next;
        if (group->own != MPI_COMM_NULL) PMPI_Comm_free(&group->own);
        netsum_finalize(group->net);
        free(group);
    }
}

bool netsum_mpi_progress(void) {
    if (!__atomic_load_n(&in_flight, __ATOMIC_ACQUIRE)) return false;
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
        if (group->first && group->first->work && !group->first->busy) op = group->first;
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
    op->retry = MPI_REQUEST_NULL;
    pthread_mutex_lock(&lock);
    __atomic_add_fetch(&in_flight, 1, __ATOMIC_RELEASE);
    netsum_mpi_prepare(&op->call, op->request == MPI_REQUEST_NULL && !group->first);
    if (group->first) group->last->next = op;
    else group->first = op;
    group->last = op;
    if (!group->waiting) group->waiting = op;
    start_waiting(group);
    pthread_mutex_unlock(&lock);
}

static int query(void *state, MPI_Status *status) {
    struct op *op = state;
    PMPI_Status_set_elements(status, MPI_BYTE, 0);
    PMPI_Status_set_cancelled(status, 0);
    status->MPI_SOURCE = MPI_UNDEFINED;
    status->MPI_TAG = MPI_UNDEFINED;
    // Open MPI would call the handler of MPI_COMM_WORLD: outcome() calls the communicator's.
    status->MPI_ERROR = MPI_SUCCESS;
    if (op->code) {
        failure = op->code;
        failed_comm = op->comm;
    }
    return MPI_SUCCESS;
}

static int release(void *state) {
    drop(state);
    return MPI_SUCCESS;
}

static int cancel(void *state, int complete) {
    (void)state, (void)complete;
    return MPI_SUCCESS;
}

void netsum_mpi_begin(void) {
    PMPI_Grequest_start(query, release, cancel, &never, &never.request);
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
    int error = PMPI_Grequest_start(query, release, cancel, op, &op->request);
    if (error) {
        free(op);
        return error;
    }
    *request = op->request;
    append(group, op);
    return MPI_SUCCESS;
}

void netsum_mpi_release(struct group *group) {
    pthread_mutex_lock(&lock);
    group->freed = true;
    pthread_mutex_unlock(&lock);
    advance_all();
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

// The error of a call that has completed requests.
static int outcome(int error) {
    if (!error && failure) {
        error = failure;
        PMPI_Comm_call_errhandler(failed_comm, error);
    }
    return error;
}

// A test, once all that is complete is known to MPI.
#define TEST(call)                                                                                 \
    do {                                                                                           \
        failure = 0;                                                                               \
        netsum_mpi_progress();                                                                     \
        return outcome(call);                                                                      \
    } while (0)

// MPI's own wait blocks, so tests replace it while operations are in flight.
#define WAIT(is_done, test, wait)                                                                  \
    do {                                                                                           \
        failure = 0;                                                                               \
        while (netsum_mpi_progress()) {                                                            \
            int error = test;                                                                      \
            if (error || is_done) return outcome(error);                                           \
            netsum_mpi_doze();                                                                     \
        }                                                                                          \
        return outcome(wait);                                                                      \
    } while (0)

int MPI_Wait(MPI_Request *request, MPI_Status *status) {
    int flag = 0;
    WAIT(flag, PMPI_Test(request, &flag, status), PMPI_Wait(request, status));
}

int MPI_Waitall(int count, MPI_Request requests[], MPI_Status statuses[]) {
    int flag = 0;
    WAIT(flag, PMPI_Testall(count, requests, &flag, statuses),
         PMPI_Waitall(count, requests, statuses));
}

int MPI_Waitany(int count, MPI_Request requests[], int *index, MPI_Status *status) {
    int flag = 0;
    WAIT(flag, PMPI_Testany(count, requests, index, &flag, status),
         PMPI_Waitany(count, requests, index, status));
}

int MPI_Waitsome(int count, MPI_Request requests[], int *done, int indices[],
                 MPI_Status statuses[]) {
    *done = 0;
    WAIT(*done, PMPI_Testsome(count, requests, done, indices, statuses),
         PMPI_Waitsome(count, requests, done, indices, statuses));
}

int MPI_Test(MPI_Request *request, int *flag, MPI_Status *status) {
    TEST(PMPI_Test(request, flag, status));
}

int MPI_Testall(int count, MPI_Request requests[], int *flag, MPI_Status statuses[]) {
    TEST(PMPI_Testall(count, requests, flag, statuses));
}

int MPI_Testany(int count, MPI_Request requests[], int *index, int *flag, MPI_Status *status) {
    TEST(PMPI_Testany(count, requests, index, flag, status));
}

int MPI_Testsome(int count, MPI_Request requests[], int *done, int indices[],
                 MPI_Status statuses[]) {
    TEST(PMPI_Testsome(count, requests, done, indices, statuses));
}

int MPI_Request_get_status(MPI_Request request, int *flag, MPI_Status *status) {
    TEST(PMPI_Request_get_status(request, flag, status));
}
