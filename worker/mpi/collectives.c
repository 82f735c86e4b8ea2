// The collective calls: which ones go over netsum, and what netsum does for them.

#include "plugin.h"

#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// The smallest result in bytes that goes over netsum with three or more ranks. With two, a ring
// sends no more bytes than netsum. Medians in ms of netsum and of Open MPI 4.1.4's own choice, 4
// hosts, 250 Mb/s, libnetsum.so without full optimisation, two cores that others used too
// (tests/tests/mpi.rs, times_beside_mpis_own):
//
//                            64 KiB        256 KiB       1 MiB         4 MiB
//     Allreduce of int       4.0   2.8     13   21       49   106      179  417
//     Reduce                 3.7   3.4     12   25       40   105      163  421
//     Bcast                  4.7   5.4     13   25       51   103      166  418
//     Reduce_scatter_block   3.6   1.1     11   10       45    51      173  526
//     Allgather              3.4   1.3     13   10       42    45      214  178
//     Barrier                1.0   0.2
//
// For a Reduce_scatter_block or an Allgather a link need not carry more than its result, so there
// MPI can be as fast.
#define NEVER SIZE_MAX
static const size_t LEAST[KINDS] = {
        [ALLREDUCE] = 256 << 10,
        [REDUCE] = 256 << 10,
        [BCAST] = 256 << 10,
        [REDUCE_SCATTER_BLOCK] = NEVER,
        [ALLGATHER] = NEVER,
        [BARRIER] = NEVER,
};

// Sums for which a link carries the bytes of their elements once.
static const struct {
    MPI_Datatype type;
    netsum_dtype dtype;
    size_t bytes;
} TYPES[] = {
    {MPI_FLOAT, NETSUM_FLOAT32, sizeof(float)},
    {MPI_INT, NETSUM_INT32, sizeof(int)},
    {MPI_UNSIGNED, NETSUM_UINT32, sizeof(unsigned)},
    {MPI_INT32_T, NETSUM_INT32, 4},
    {MPI_UINT32_T, NETSUM_UINT32, 4},
    {MPI_REAL, NETSUM_FLOAT32, 4},
    {MPI_INTEGER, NETSUM_INT32, 4},
};

static bool is_sum(struct call *call) {
    if (call->op != MPI_SUM || call->type == MPI_DATATYPE_NULL) return false;
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++)
        if (TYPES[i].type == call->type) {
            call->dtype = TYPES[i].dtype;
            call->bytes = TYPES[i].bytes;
            return true;
        }
    return false;
}

// The communicator's group if netsum takes the call; the same at all ranks, because it depends only
// on what MPI demands to be the same.
static struct group *choose(struct call *call, MPI_Comm comm, bool blocking) {
    size_t total = 0;
    int size = 0;
    bool can = comm != MPI_COMM_NULL && !PMPI_Comm_size(comm, &call->ranks);
    if (!can) return NULL;
    if (call->kind != BARRIER && call->count > 0 && call->type != MPI_DATATYPE_NULL &&
        !PMPI_Type_size(call->type, &size))
        total = (size_t)size * (size_t)call->count;
    if (call->kind == ALLREDUCE || call->kind == REDUCE || call->kind == REDUCE_SCATTER_BLOCK) {
        // If netsum refuses a NaN or an infinity, MPI repeats the sum, for which all ranks must wait
        // in it: a nonblocking one could wait for a rank that is elsewhere in MPI.
        can = total > 0 && is_sum(call) && (blocking || call->dtype != NETSUM_FLOAT32);
    } else if (call->kind != BARRIER) {
        can = total > 0 && total <= INT_MAX;
        call->bytes = total;
    }
    if (call->kind == REDUCE_SCATTER_BLOCK || call->kind == ALLGATHER) total *= (size_t)call->ranks;
    if (call->kind == REDUCE || call->kind == BCAST)
        can = can && call->root >= 0 && call->root < call->ranks;
    long long own = netsum_mpi_min_bytes();
    bool worth = can && (own >= 0 ? total >= (size_t)own
                                : call->ranks > 2 && total >= LEAST[call->kind]);
    struct group *group = netsum_mpi_group(comm, blocking, worth);
    if (group) PMPI_Comm_rank(comm, &call->rank);
    netsum_mpi_count(call->kind, group, total);
    return group;
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

// The program may free the type while the operation is in flight.
static void keep_type(struct call *call) {
    PMPI_Type_dup(call->type, &call->type);
    call->unpacked = true;
}

static void prepare_broadcast(struct call *call, bool alone) {
    bool is_root = call->rank == call->root, dense = is_dense(call->type);
    call->output = call->recv;
    if (!dense) {
        call->output = room(call, call->bytes);
        if (is_root) pack(call, call->recv, call->count, call->type, call->output);
        if (!is_root) keep_type(call);
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
        keep_type(call);
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
    if (call->unpacked) PMPI_Type_free(&call->type);
    free(call->scratch[0]);
    free(call->scratch[1]);
}

#define BLOCKING(own)                                                                              \
    struct group *group = choose(&call, comm, true);                                               \
    return group ? netsum_mpi_run(group, &call) : own

#define NONBLOCKING(own)                                                                           \
    struct group *group = choose(&call, comm, false);                                              \
    return group ? netsum_mpi_start(group, &call, request) : own

int MPI_Allreduce(const void *send, void *recv, int count, MPI_Datatype type, MPI_Op op,
                  MPI_Comm comm) {
    struct call call = {ALLREDUCE, send, recv, .count = count, .type = type, .op = op};
    BLOCKING(PMPI_Allreduce(send, recv, count, type, op, comm));
}

int MPI_Iallreduce(const void *send, void *recv, int count, MPI_Datatype type, MPI_Op op,
                   MPI_Comm comm, MPI_Request *request) {
    struct call call = {ALLREDUCE, send, recv, .count = count, .type = type, .op = op};
    NONBLOCKING(PMPI_Iallreduce(send, recv, count, type, op, comm, request));
}

int MPI_Reduce(const void *send, void *recv, int count, MPI_Datatype type, MPI_Op op, int root,
               MPI_Comm comm) {
    struct call call = {REDUCE, send, recv, .count = count, .type = type, .op = op, .root = root};
    BLOCKING(PMPI_Reduce(send, recv, count, type, op, root, comm));
}

int MPI_Ireduce(const void *send, void *recv, int count, MPI_Datatype type, MPI_Op op, int root,
                MPI_Comm comm, MPI_Request *request) {
    struct call call = {REDUCE, send, recv, .count = count, .type = type, .op = op, .root = root};
    NONBLOCKING(PMPI_Ireduce(send, recv, count, type, op, root, comm, request));
}

int MPI_Reduce_scatter_block(const void *send, void *recv, int count, MPI_Datatype type, MPI_Op op,
                             MPI_Comm comm) {
    struct call call = {REDUCE_SCATTER_BLOCK, send, recv, .count = count, .type = type, .op = op};
    BLOCKING(PMPI_Reduce_scatter_block(send, recv, count, type, op, comm));
}

int MPI_Ireduce_scatter_block(const void *send, void *recv, int count, MPI_Datatype type, MPI_Op op,
                              MPI_Comm comm, MPI_Request *request) {
    struct call call = {REDUCE_SCATTER_BLOCK, send, recv, .count = count, .type = type, .op = op};
    NONBLOCKING(PMPI_Ireduce_scatter_block(send, recv, count, type, op, comm, request));
}

int MPI_Bcast(void *data, int count, MPI_Datatype type, int root, MPI_Comm comm) {
    struct call call = {BCAST, .recv = data, .count = count, .type = type, .root = root};
    BLOCKING(PMPI_Bcast(data, count, type, root, comm));
}

int MPI_Ibcast(void *data, int count, MPI_Datatype type, int root, MPI_Comm comm,
               MPI_Request *request) {
    struct call call = {BCAST, .recv = data, .count = count, .type = type, .root = root};
    NONBLOCKING(PMPI_Ibcast(data, count, type, root, comm, request));
}

int MPI_Allgather(const void *send, int send_count, MPI_Datatype send_type, void *recv, int count,
                  MPI_Datatype type, MPI_Comm comm) {
    struct call call = {
            .kind = ALLGATHER, .send = send, .recv = recv, .count = count, .type = type,
            .send_count = send_count, .send_type = send_type,
    };
    BLOCKING(PMPI_Allgather(send, send_count, send_type, recv, count, type, comm));
}

int MPI_Iallgather(const void *send, int send_count, MPI_Datatype send_type, void *recv, int count,
                   MPI_Datatype type, MPI_Comm comm, MPI_Request *request) {
    struct call call = {
            .kind = ALLGATHER, .send = send, .recv = recv, .count = count, .type = type,
            .send_count = send_count, .send_type = send_type,
    };
    NONBLOCKING(PMPI_Iallgather(send, send_count, send_type, recv, count, type, comm, request));
}

int MPI_Barrier(MPI_Comm comm) {
    struct call call = {.kind = BARRIER};
    BLOCKING(PMPI_Barrier(comm));
}

int MPI_Ibarrier(MPI_Comm comm, MPI_Request *request) {
    struct call call = {.kind = BARRIER};
    NONBLOCKING(PMPI_Ibarrier(comm, request));
}
