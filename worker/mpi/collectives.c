// The collective calls, and which ones go over netsum.

#include "world.h"

#include <limits.h>
#include <stdint.h>

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

// Whether netsum takes the call, and its error code; the same at all ranks, because it depends only
// on what MPI demands to be the same.
static bool take(struct call *call, MPI_Comm comm, enum form form, MPI_Request *request,
                 int *error) {
    int size = 0;
    if (comm == MPI_COMM_NULL || PMPI_Comm_size(comm, &call->ranks)) return false;
    if (call->kind != BARRIER && call->count > 0 && call->type != MPI_DATATYPE_NULL &&
        !PMPI_Type_size(call->type, &size))
        call->total = (size_t)size * (size_t)call->count;
    bool can = true;
    if (call->kind == ALLREDUCE || call->kind == REDUCE || call->kind == REDUCE_SCATTER_BLOCK) {
        // If netsum refuses a NaN or an infinity, MPI repeats the sum, for which all ranks must wait
        // in it: a nonblocking one could wait for a rank that is elsewhere in MPI.
        can = call->total > 0 && is_sum(call) &&
              (form == BLOCKING || call->dtype != NETSUM_FLOAT32);
    } else if (call->kind != BARRIER) {
        can = call->total > 0 && call->total <= INT_MAX;
        call->bytes = call->total;
    }
    if (call->kind == REDUCE_SCATTER_BLOCK || call->kind == ALLGATHER)
        call->total *= (size_t)call->ranks;
    if (call->kind == REDUCE || call->kind == BCAST)
        can = can && call->root >= 0 && call->root < call->ranks;
    long long own = netsum_mpi_min_bytes();
    bool worth = can && (own >= 0 ? call->total >= (size_t)own
                                  : call->ranks > 2 && call->total >= LEAST[call->kind]);
    struct group *group = netsum_mpi_group(comm, form, worth);
    if (group) PMPI_Comm_rank(comm, &call->rank);
    else netsum_mpi_count(call, false);
    if (group)
        *error = form == BLOCKING      ? netsum_mpi_run(group, call)
                 : form == NONBLOCKING ? netsum_mpi_start(group, call, request)
                                       : netsum_mpi_persist(group, call, request);
    return group;
}

// Open MPI's extension pcollreq has persistent forms with other names.
#if defined OPEN_MPI && OMPI_MAJOR_VERSION < 5
#define INIT(PREFIX, NAME) PREFIX##X_##NAME##_init
#else
#define INIT(PREFIX, NAME) PREFIX##_##NAME##_init
#endif

#define UNPACK(...) __VA_ARGS__
#define BODY(FORM, REQUEST, OWN, ...)                                                              \
    {                                                                                              \
        struct call call = {__VA_ARGS__};                                                          \
        int error;                                                                                 \
        return take(&call, comm, FORM, REQUEST, &error) ? error : OWN;                             \
    }
// The blocking, the nonblocking and the persistent form of a call.
#define FORMS(NAME, INAME, PARAMETERS, ARGUMENTS, ...)                                             \
    int MPI_##NAME(UNPACK PARAMETERS MPI_Comm comm)                                                \
        BODY(BLOCKING, NULL, PMPI_##NAME(UNPACK ARGUMENTS comm), __VA_ARGS__)                      \
    int MPI_##INAME(UNPACK PARAMETERS MPI_Comm comm, MPI_Request *request)                         \
        BODY(NONBLOCKING, request, PMPI_##INAME(UNPACK ARGUMENTS comm, request), __VA_ARGS__)      \
    int INIT(MPI, NAME)(UNPACK PARAMETERS MPI_Comm comm, MPI_Info info, MPI_Request *request)      \
        BODY(PERSISTENT, request, INIT(PMPI, NAME)(UNPACK ARGUMENTS comm, info, request),          \
             __VA_ARGS__)

FORMS(Allreduce, Iallreduce,
      (const void *send, void *recv, int count, MPI_Datatype type, MPI_Op op,),
      (send, recv, count, type, op,),
      ALLREDUCE, send, recv, .count = count, .type = type, .op = op)
FORMS(Reduce, Ireduce,
      (const void *send, void *recv, int count, MPI_Datatype type, MPI_Op op, int root,),
      (send, recv, count, type, op, root,),
      REDUCE, send, recv, .count = count, .type = type, .op = op, .root = root)
FORMS(Reduce_scatter_block, Ireduce_scatter_block,
      (const void *send, void *recv, int count, MPI_Datatype type, MPI_Op op,),
      (send, recv, count, type, op,),
      REDUCE_SCATTER_BLOCK, send, recv, .count = count, .type = type, .op = op)
FORMS(Bcast, Ibcast, (void *data, int count, MPI_Datatype type, int root,),
      (data, count, type, root,),
      BCAST, .recv = data, .count = count, .type = type, .root = root)
FORMS(Allgather, Iallgather,
      (const void *send, int send_count, MPI_Datatype send_type, void *recv, int count,
       MPI_Datatype type,),
      (send, send_count, send_type, recv, count, type,),
      ALLGATHER, send, recv, .count = count, .type = type, .send_count = send_count,
      .send_type = send_type)
FORMS(Barrier, Ibarrier, (), (), .kind = BARRIER)
