// What the files of libnetsum-mpi.so share.

#ifndef NETSUM_MPI_PLUGIN_H
#define NETSUM_MPI_PLUGIN_H

#include <mpi.h>
#include <netsum.h>
#include <stdbool.h>
#include <stddef.h>

enum kind { ALLREDUCE, REDUCE, BCAST, REDUCE_SCATTER_BLOCK, ALLGATHER, BARRIER, KINDS };

struct op;

// What netsum knows of an MPI communicator.
struct group {
    // NULL: its collectives are MPI's own.
    netsum_comm *net;
    // Joining was tried, or is pointless.
    bool tried;
    // A nonblocking call would have used it, but only blocking ones can join.
    bool wanted;
    // MPI has freed the communicator.
    bool freed;
    MPI_Comm comm;
    // The same ranks, for operations that netsum refuses after their start: infinities, NaNs.
    MPI_Comm own;
    // Operations in flight in the order of their calls, and the first that has not been started.
    struct op *first, *last, *waiting;
    int started;
    struct group *next;
};

// A collective call, and the memory that netsum works on.
struct call {
    enum kind kind;
    const void *send;
    void *recv;
    int count, send_count;
    MPI_Datatype type, send_type;
    MPI_Op op;
    int root;
    netsum_dtype dtype;
    // Of an element, a rank's block or a broadcast.
    size_t bytes;
    int rank, ranks;
    // Buffer of the result, and this rank's contribution, unless `output` has it.
    void *output;
    const void *input;
    // Copy the result from `output` to `recv` at the end: so many bytes, or unpack them.
    size_t copied;
    bool unpacked;
    void *scratch[2];
};

// A call in flight.
struct op {
    struct call call;
    struct op *next;
    netsum_work *work;
    // The same operation by MPI.
    MPI_Request retry;
    // MPI_REQUEST_NULL for a blocking call.
    MPI_Request request;
    // MPI's error code, and whose handler gets it.
    int code;
    MPI_Comm comm;
    bool done;
    // The queue, and MPI's request, which MPICH 4.0.2 may drop before the operation ends.
    int holders;
    // A thread waits for `work` without the lock.
    bool busy;
};

// The communicator's group if it has joined netsum. In a blocking call it joins now if a call has
// wanted that.
struct group *netsum_mpi_group(MPI_Comm comm, bool blocking, bool worth);
// An error code with the text of this thread's last error of netsum.
int netsum_mpi_code(netsum_status status);
// Counts a call in the statistics.
void netsum_mpi_count(enum kind kind, bool by_netsum, size_t bytes);
// NETSUM_MPI_MIN_BYTES, or -1.
long long netsum_mpi_min_bytes(void);

// Prepares memory for a call that netsum takes; `alone` if no other operation may use the buffers.
void netsum_mpi_prepare(struct call *call, bool alone);
netsum_status netsum_mpi_issue(netsum_comm *net, struct call *call, netsum_work **work);
int netsum_mpi_retry(struct call *call, MPI_Comm comm, MPI_Request *request);
void netsum_mpi_finish(struct call *call, MPI_Comm comm, bool succeeded);

void netsum_mpi_begin(void);
// Runs a call to its end, or starts it.
int netsum_mpi_run(struct group *group, const struct call *call);
int netsum_mpi_start(struct group *group, const struct call *call, MPI_Request *request);
// Completes what is complete. Returns whether any operation is in flight.
bool netsum_mpi_progress(void);
// Waits a little for the oldest operation.
void netsum_mpi_doze(void);
void netsum_mpi_add(struct group *group);
// MPI frees the communicator: leaves netsum once nothing is in flight.
void netsum_mpi_release(struct group *group);
// All groups leave.
void netsum_mpi_leave(void);

#endif
