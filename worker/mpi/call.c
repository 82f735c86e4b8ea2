// Calls over netsum: their memory, and the statistics.

#include "call.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const NAMES[KINDS] = {"Allreduce",            "Reduce",    "Bcast",
                                         "Reduce_scatter_block", "Allgather", "Barrier"};
// By MPI, and by netsum.
static struct { unsigned long long calls, bytes; } counted[KINDS][2];

void netsum_mpi_count(const struct call *call, bool by_netsum) {
    __atomic_add_fetch(&counted[call->kind][by_netsum].calls, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&counted[call->kind][by_netsum].bytes, call->total, __ATOMIC_RELAXED);
}

void netsum_mpi_print_counts(void) {
    for (int kind = 0; kind < KINDS; kind++)
        if (counted[kind][0].calls + counted[kind][1].calls)
            fprintf(stderr,
                    "netsum-mpi: %s: netsum %llu calls, %llu bytes; MPI %llu calls, %llu bytes\n",
                    NAMES[kind], counted[kind][1].calls, counted[kind][1].bytes,
                    counted[kind][0].calls, counted[kind][0].bytes);
}

static void *room(struct call *call, size_t bytes) {
    void **free_one = &call->scratch[call->scratch[0] ? 1 : 0];
    if (!(*free_one = malloc(bytes))) abort();
    return *free_one;
}

static void *copy(struct call *call, const void *from, size_t bytes) {
    return memcpy(room(call, bytes), from, bytes);
}

// Elements that netsum reads must be aligned; MPI's need not be.
static bool is_aligned(const struct call *call, const void *at) {
    return (uintptr_t)at % call->bytes == 0;
}

// Whether elements follow each other without gaps and in order.
static bool is_dense(MPI_Datatype type) {
    int n[3], combiner, size;
    MPI_Aint start, extent;
    PMPI_Type_get_envelope(type, &n[0], &n[1], &n[2], &combiner);
    PMPI_Type_size(type, &size);
    PMPI_Type_get_extent(type, &start, &extent);
    return combiner == MPI_COMBINER_NAMED && start == 0 && extent == size;
}

static void pack(const struct call *call, const void *from, int count, MPI_Datatype type,
                 void *to) {
    int at = 0;
    PMPI_Pack(from, count, type, to, (int)call->bytes, &at, MPI_COMM_WORLD);
}

void netsum_mpi_keep_types(struct call *call, bool keep) {
    MPI_Datatype *types[] = {&call->type, &call->send_type};
    int moves = call->kind == BCAST || call->kind == ALLGATHER;
    int used = moves + (call->kind == ALLGATHER && call->send != MPI_IN_PLACE);
    for (int i = 0; i < used; i++) {
        if (is_dense(*types[i])) continue;
        if (keep) PMPI_Type_dup(*types[i], types[i]);
        else PMPI_Type_free(types[i]);
    }
}

// A reduction in place at the ranks that get its result.
static void prepare_sum(struct call *call, bool alone, bool has_result) {
    size_t bytes = call->bytes * (size_t)call->count;
    bool in_place = has_result && call->send == MPI_IN_PLACE;
    const void *from = in_place ? call->recv : call->send;
    if (!has_result) {
        // Nothing is written, but netsum would refuse another operation that reads it.
        bool needs_copy = !alone || !is_aligned(call, from);
        call->output = needs_copy ? copy(call, from, bytes) : (void *)(uintptr_t)from;
        call->input = call->output;
        return;
    }
    call->input = from;
    // For MPI, if it repeats the sum.
    if (in_place && call->dtype == NETSUM_FLOAT32)
        call->input = copy(call, from, bytes);
    if (!is_aligned(call, call->recv)) {
        call->output = copy(call, from, bytes);
        call->copied = bytes;
    } else {
        call->output = call->recv;
        if (!in_place) memcpy(call->output, from, bytes);
    }
}

static void prepare_scatter(struct call *call) {
    size_t bytes = call->bytes * (size_t)call->count;
    bool in_place = call->send == MPI_IN_PLACE;
    call->input = in_place ? call->recv : call->send;
    if (!is_aligned(call, call->input))
        call->input = copy(call, call->input, bytes * (size_t)call->ranks);
    call->output = call->recv;
    if (in_place || !is_aligned(call, call->recv)) {
        call->output = room(call, bytes);
        call->copied = bytes;
    }
}

static void prepare_broadcast(struct call *call, bool alone) {
    bool is_root = call->rank == call->root, dense = is_dense(call->type);
    call->output = call->recv;
    if (!dense) {
        call->output = room(call, call->bytes);
        if (is_root) pack(call, call->recv, call->count, call->type, call->output);
        call->unpacked = !is_root;
    } else if (is_root && !alone) {
        // Nothing is written, as above.
        call->output = copy(call, call->recv, call->bytes);
    }
}

static void prepare_gather(struct call *call) {
    size_t all = call->bytes * (size_t)call->ranks, before = call->bytes * (size_t)call->rank;
    call->output = call->recv;
    if (!is_dense(call->type)) {
        call->output = room(call, all);
        call->unpacked = true;
    }
    char *own = (char *)call->output + before;
    if (call->send == MPI_IN_PLACE) {
        MPI_Aint start, extent;
        PMPI_Type_get_extent(call->type, &start, &extent);
        const char *from = (const char *)call->recv + extent * call->count * call->rank;
        if (call->unpacked) pack(call, from, call->count, call->type, own);
        call->input = own;
    } else if (is_dense(call->send_type)) {
        call->input = call->send;
    } else {
        pack(call, call->send, call->send_count, call->send_type, own);
        call->input = own;
    }
}

void netsum_mpi_prepare(struct call *call, bool alone) {
    netsum_mpi_keep_types(call, true);
    switch (call->kind) {
    case ALLREDUCE: prepare_sum(call, alone, true); break;
    case REDUCE: prepare_sum(call, alone, call->rank == call->root); break;
    case REDUCE_SCATTER_BLOCK: prepare_scatter(call); break;
    case BCAST: prepare_broadcast(call, alone); break;
    case ALLGATHER: prepare_gather(call); break;
    default: break;
    }
}

netsum_status netsum_mpi_issue(netsum_comm *net, struct call *call, netsum_work **work) {
    size_t count = (size_t)call->count;
    void *out = call->output;
    switch (call->kind) {
    case ALLREDUCE: return netsum_all_reduce(net, out, count, call->dtype, NETSUM_SUM, work);
    case REDUCE:
        return netsum_reduce(net, out, count, call->dtype, NETSUM_SUM, (uint32_t)call->root, work);
    case REDUCE_SCATTER_BLOCK:
        return netsum_reduce_scatter(net, out, call->input, count, call->dtype, NETSUM_SUM, work);
    case BCAST: return netsum_broadcast(net, out, call->bytes, (uint32_t)call->root, work);
    case ALLGATHER: return netsum_all_gather(net, out, call->input, call->bytes, work);
    default: return netsum_barrier(net, work);
    }
}

int netsum_mpi_retry(struct call *call, MPI_Comm comm, MPI_Request *request) {
    const void *in = call->input;
    void *out = call->output;
    int count = call->count;
    MPI_Datatype type = call->type;
    switch (call->kind) {
    case ALLREDUCE: return PMPI_Iallreduce(in, out, count, type, MPI_SUM, comm, request);
    case REDUCE: return PMPI_Ireduce(in, out, count, type, MPI_SUM, call->root, comm, request);
    default:
        return PMPI_Ireduce_scatter_block(in, out, count, type, MPI_SUM, comm, request);
    }
}

void netsum_mpi_finish(struct call *call, MPI_Comm comm, bool succeeded) {
    if (succeeded && call->copied) memcpy(call->recv, call->output, call->copied);
    if (succeeded && call->unpacked) {
        int at = 0, count = call->count;
        size_t bytes = call->bytes;
        MPI_Aint start, extent;
        PMPI_Type_get_extent(call->type, &start, &extent);
        int blocks = call->kind == ALLGATHER ? call->ranks : 1;
        for (int i = 0; i < blocks; i++, at = 0)
            PMPI_Unpack((char *)call->output + bytes * (size_t)i, (int)bytes, &at,
                  (char *)call->recv + extent * count * i, count, call->type, comm);
    }
    netsum_mpi_keep_types(call, false);
    free(call->scratch[0]);
    free(call->scratch[1]);
}
