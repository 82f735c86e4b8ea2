// A collective call, and what netsum does for it.

#pragma once

#include <mpi.h>
#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif
#include <netsum.h>
#include <stdbool.h>
#include <stddef.h>

enum kind { ALLREDUCE, REDUCE, BCAST, REDUCE_SCATTER_BLOCK, ALLGATHER, BARRIER, KINDS };

// A call, and the memory that netsum works on.
struct call {
    enum kind kind;
    const void *send;
    void *recv;
    int count, send_count;
    MPI_Datatype type, send_type;
    MPI_Op op;
    int root;
    netsum_dtype dtype;
    // Of an element, a rank's block or a broadcast; and of the result.
    size_t bytes, total;
    int rank, ranks;
    // Buffer of the result, and this rank's contribution, unless `output` has it.
    void *output;
    const void *input;
    // Copy the result from `output` to `recv` at the end: so many bytes, or unpack them.
    size_t copied;
    bool unpacked;
    void *scratch[2];
};

// Prepares memory for a call; `alone` if no other operation may use the buffers.
void netsum_mpi_prepare(struct call *call, bool alone);
netsum_status netsum_mpi_issue(netsum_comm *net, struct call *call, netsum_work **work);
int netsum_mpi_retry(struct call *call, MPI_Comm comm, MPI_Request *request);
void netsum_mpi_finish(struct call *call, MPI_Comm comm, bool succeeded);
// Duplicates types, which the program may free while the call needs them, or frees the duplicates.
void netsum_mpi_keep_types(struct call *call, bool keep);

// Counts a call in the statistics.
void netsum_mpi_count(const struct call *call, bool by_netsum);
void netsum_mpi_print_counts(void);
