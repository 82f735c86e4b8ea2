// MPI's functions that start, complete and free requests.

#include "requests.h"

#include <pthread.h>
#include <stdlib.h>

// A persistent request. The program has a handle that never becomes active.
struct persistent {
    MPI_Request handle;
    // MPI_REQUEST_NULL between completion and start.
    MPI_Request active;
    struct group *group;
    struct call call;
    struct persistent *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct persistent *all;

int netsum_mpi_persist(struct group *group, const struct call *call, MPI_Request *request) {
    struct persistent *made = malloc(sizeof *made);
    if (!made) abort();
    PMPI_Recv_init(NULL, 0, MPI_BYTE, 0, 0, MPI_COMM_SELF, request);
    pthread_mutex_lock(&lock);
    *made = (struct persistent){*request, MPI_REQUEST_NULL, group, *call, all};
    netsum_mpi_keep_types(&made->call, true);
    __atomic_store_n(&all, made, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    return MPI_SUCCESS;
}

static struct persistent *find(MPI_Request handle, bool remove) {
    struct persistent **at = &all, *found;
    if (!__atomic_load_n(at, __ATOMIC_ACQUIRE) || handle == MPI_REQUEST_NULL) return NULL;
    pthread_mutex_lock(&lock);
    while ((found = *at) && found->handle != handle) at = &found->next;
    if (found && remove) *at = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

int MPI_Start(MPI_Request *request) {
    struct persistent *found = find(*request, false);
    if (!found) return PMPI_Start(request);
    return netsum_mpi_start(found->group, &found->call, &found->active);
}

int MPI_Startall(int count, MPI_Request requests[]) {
    int error = MPI_SUCCESS;
    for (int i = 0; i < count && !error; i++) error = MPI_Start(&requests[i]);
    return error;
}

int MPI_Request_free(MPI_Request *request) {
    struct persistent *found = find(*request, true);
    if (found) {
        if (found->active != MPI_REQUEST_NULL) PMPI_Request_free(&found->active);
        netsum_mpi_keep_types(&found->call, false);
        netsum_mpi_idle(found->group);
        free(found);
    }
    return PMPI_Request_free(request);
}

// Replaces persistent requests by the active ones; returns those, or NULL.
static struct persistent **enter(int count, MPI_Request requests[]) {
    struct persistent **found = NULL, *one;
    for (int i = 0; i < count; i++) {
        if (!(one = find(requests[i], false))) continue;
        if (!found && !(found = calloc((size_t)count, sizeof *found))) abort();
        found[i] = one;
        requests[i] = one->active;
    }
    return found;
}

static int leave(int count, MPI_Request requests[], struct persistent **found, int error) {
    for (int i = 0; i < count && found; i++)
        if (found[i]) {
            found[i]->active = requests[i];
            requests[i] = found[i]->handle;
        }
    free(found);
    return netsum_mpi_outcome(error);
}

// A test, once all that is complete is known to MPI.
#define TEST(count, requests, call)                                                                \
    do {                                                                                           \
        struct persistent **found = enter(count, requests);                                        \
        netsum_mpi_progress();                                                                     \
        return leave(count, requests, found, call);                                                \
    } while (0)

// MPI's own wait blocks, so tests replace it while operations are in flight.
#define WAIT(count, requests, is_done, test, wait)                                                 \
    do {                                                                                           \
        struct persistent **found = enter(count, requests);                                        \
        while (netsum_mpi_progress()) {                                                            \
            int error = test;                                                                      \
            if (error || is_done) return leave(count, requests, found, error);                     \
            netsum_mpi_doze();                                                                     \
        }                                                                                          \
        return leave(count, requests, found, wait);                                                \
    } while (0)

#define UNPACK(...) __VA_ARGS__
#define BOTH(OF, COUNT, PARAMETERS, ARGUMENTS)                                                     \
    int MPI_Wait##OF(UNPACK PARAMETERS MPI_Status *status) {                                       \
        int flag = 0;                                                                              \
        WAIT(COUNT, requests, flag, PMPI_Test##OF(UNPACK ARGUMENTS &flag, status),                 \
             PMPI_Wait##OF(UNPACK ARGUMENTS status));                                              \
    }                                                                                              \
    int MPI_Test##OF(UNPACK PARAMETERS int *flag, MPI_Status *status) {                            \
        TEST(COUNT, requests, PMPI_Test##OF(UNPACK ARGUMENTS flag, status));                       \
    }

BOTH(, 1, (MPI_Request requests[],), (requests,))
BOTH(any, count, (int count, MPI_Request requests[], int *index,), (count, requests, index,))

// MPICH 4.0.2's test of several fails if one is a persistent collective of its own.
int MPI_Waitall(int count, MPI_Request requests[], MPI_Status statuses[]) {
    int error = MPI_SUCCESS;
    if (!netsum_mpi_progress() && !__atomic_load_n(&all, __ATOMIC_ACQUIRE))
        return netsum_mpi_outcome(PMPI_Waitall(count, requests, statuses));
    for (int i = 0; i < count; i++) {
        MPI_Status *status = statuses == MPI_STATUSES_IGNORE ? MPI_STATUS_IGNORE : &statuses[i];
        int code = MPI_Wait(&requests[i], status);
        if (code) error = MPI_ERR_IN_STATUS;
        if (status != MPI_STATUS_IGNORE) status->MPI_ERROR = code;
    }
    return error;
}

int MPI_Testall(int count, MPI_Request requests[], int *flag, MPI_Status statuses[]) {
    TEST(count, requests, PMPI_Testall(count, requests, flag, statuses));
}

int MPI_Waitsome(int count, MPI_Request requests[], int *done, int indices[],
                 MPI_Status statuses[]) {
    *done = 0;
    WAIT(count, requests, *done, PMPI_Testsome(count, requests, done, indices, statuses),
         PMPI_Waitsome(count, requests, done, indices, statuses));
}

int MPI_Testsome(int count, MPI_Request requests[], int *done, int indices[],
                 MPI_Status statuses[]) {
    TEST(count, requests, PMPI_Testsome(count, requests, done, indices, statuses));
}

int MPI_Request_get_status(MPI_Request request, int *flag, MPI_Status *status) {
    TEST(1, &request, PMPI_Request_get_status(request, flag, status));
}
