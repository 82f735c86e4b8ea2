/* Sums for NCCL: groups of one netsum job.
 *
 * NCCL calls listen and connect at one rank of each host, a head; a host has one or several, each
 * with its own group, and its other ranks never call (src/transport/coll_net.cc, ncclCollNetSetup).
 * So there is no communicator of all ranks to split: heads join the job as a group, whose name is
 * in the handle of the first. */
#include <netsum.h>

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "inside.h"

/* A handle: the name that this head would give a group. */
struct handle {
    char magic[8];
    char group[25];
};
static const char MAGIC[8] = "netsum1";

struct coll;

struct request {
    atomic_bool used;
    struct coll *coll;
    netsum_work *work;
    size_t size;
};

struct coll {
    netsum_comm *comm;
    int rank, ranks;
    atomic_int mode; /* of the last sum, plus 1; 0 before the first */
    struct request requests[NCCL_NET_MAX_REQUESTS];
};

/* Logs the thread's last error, and returns NCCL's word for it. */
static ncclResult_t failed(netsum_status status, const char *doing) {
    LOG(WARN, "%s: %s", doing, netsum_error_text());
    switch (status) {
    case NETSUM_ERROR_ARGUMENT:
    case NETSUM_ERROR_MISMATCH:
        return ncclInvalidArgument;
    case NETSUM_ERROR_RANK_DIED:
    case NETSUM_ERROR_RANK_LEFT:
    case NETSUM_ERROR_UNREACHABLE:
    case NETSUM_ERROR_JOB_FAILED:
        return ncclRemoteError;
    case NETSUM_ERROR_INTERNAL:
        return ncclInternalError;
    default:
        return ncclSystemError;
    }
}

ncclResult_t coll_listen(int device, void *handle, void **listener) {
    struct handle *mine = handle;
    unsigned char random[12];
    if (device != 0 || !handle || !listener) {
        LOG(WARN, "listen: device %d does not exist, or an argument is NULL", device);
        return ncclInvalidArgument;
    }
    if (getrandom(random, sizeof random, 0) != sizeof random) return ncclSystemError;
    memset(mine, 0, sizeof *mine);
    memcpy(mine->magic, MAGIC, sizeof MAGIC);
    for (size_t i = 0; i < sizeof random; i++) {
        snprintf(mine->group + 2 * i, 3, "%02x", random[i]);
    }
    /* A listener has no state, but NCCL expects a pointer. */
    *listener = &netsum_device;
    return ncclSuccess;
}

ncclResult_t coll_close_listen(UNUSED void *listener) {
    return ncclSuccess;
}

static netsum_status join(const char *group, int ranks, int rank, netsum_comm **comm) {
    char number[2][12];
    netsum_config *config = NULL;
    netsum_status status = netsum_config_new(&config);
    snprintf(number[0], sizeof number[0], "%d", rank);
    snprintf(number[1], sizeof number[1], "%d", ranks);
    if (status == NETSUM_OK) status = netsum_config_set(config, "rank", number[0]);
    if (status == NETSUM_OK) status = netsum_config_set(config, "ranks", number[1]);
    /* Without a box there are no groups: the addresses are those of one communicator. */
    const char *peers = getenv("NETSUM_PEERS");
    if (status == NETSUM_OK && (!peers || !*peers)) {
        status = netsum_config_set(config, "group", group);
    }
    if (status == NETSUM_OK) status = netsum_init(config, comm);
    netsum_config_free(config);
    return status;
}

/* Returns when all ranks have joined. If it fails, NCCL does without; it expects that all fail. */
ncclResult_t coll_connect(void *handles[], int ranks, int rank, void *listener, void **comm) {
    if (!comm) return ncclInvalidArgument;
    *comm = NULL;
    if (!handles || !listener || ranks < 1 || rank < 0 || rank >= ranks) {
        LOG(WARN, "connect: rank %d of %d, or an argument is NULL", rank, ranks);
        return ncclInvalidArgument;
    }
    struct handle first;
    memcpy(&first, handles[0], sizeof first);
    if (memcmp(first.magic, MAGIC, sizeof MAGIC) != 0 || !memchr(first.group, 0, 25)) {
        LOG(WARN, "connect: rank 0 uses another plugin, or another version of it");
        return ncclInvalidArgument;
    }
    struct coll *coll = calloc(1, sizeof *coll);
    if (!coll) return ncclSystemError;
    netsum_status status = join(first.group, ranks, rank, &coll->comm);
    if (status != NETSUM_OK) {
        free(coll);
        return failed(status, "connect");
    }
    coll->rank = rank;
    coll->ranks = ranks;
    *comm = coll;
    return ncclSuccess;
}

/* The type, and the bytes of an element; 0 if it is not supported. */
static size_t element(ncclDataType_t type, netsum_dtype *dtype) {
    *dtype = type == ncclInt32     ? NETSUM_INT32
           : type == ncclFloat32   ? NETSUM_FLOAT32
           : type == ncclFloat16   ? NETSUM_FLOAT16
           : type == ncclBfloat16  ? NETSUM_BFLOAT16
                                   : 0;
    return type == ncclInt32 || type == ncclFloat32 ? 4 : *dtype ? 2 : 0;
}

ncclResult_t coll_reduce_support(ncclDataType_t type, ncclRedOp_t op, int *supported) {
    netsum_dtype unused;
    if (!supported) return ncclInvalidArgument;
    *supported = op == ncclSum && element(type, &unused) != 0;
    return ncclSuccess;
}

static struct request *unused_request(struct coll *coll) {
    for (int i = 0; i < NCCL_NET_MAX_REQUESTS; i++) {
        struct request *request = &coll->requests[i];
        if (!atomic_exchange(&request->used, true)) {
            request->coll = coll;
            return request;
        }
    }
    return NULL;
}

ncclResult_t coll_all_reduce(void *comm, void *send, void *recv, size_t count, ncclDataType_t type,
                             ncclRedOp_t op, void **request) {
    struct coll *coll = comm;
    netsum_dtype dtype = 0;
    size_t size = element(type, &dtype);
    if (!request) return ncclInvalidArgument;
    *request = NULL;
    if (!coll || !send || !recv || count > SIZE_MAX / 8) {
        LOG(WARN, "all-reduce: an argument is NULL, or the count is too large");
        return ncclInvalidArgument;
    }
    if (!size || op != ncclSum) {
        LOG(WARN, "all-reduce: type %d, operation %d: neither is offered", (int)type, (int)op);
        return ncclInvalidArgument;
    }
    struct request *found = unused_request(coll);
    if (!found) return ncclSuccess; /* NCCL calls again */
    found->size = count * size;
    if (send != recv) memmove(recv, send, found->size);
    netsum_status status =
        netsum_all_reduce(coll->comm, recv, count, dtype, NETSUM_SUM, &found->work);
    if (status != NETSUM_OK) {
        found->work = NULL;
        atomic_store(&found->used, false);
        return failed(status, "all-reduce");
    }
    *request = found;
    return ncclSuccess;
}

/* Says what summed first, and when that changes. */
static void note(struct coll *coll, netsum_mode mode) {
    if (atomic_exchange(&coll->mode, mode + 1) == (int)mode + 1) return;
    if (mode == NETSUM_BOX) {
        LOG(INFO, "the box sums, rank %d of %d", coll->rank, coll->ranks);
    } else {
        LOG(WARN, "the hosts' ring sums, rank %d of %d: see the box's log, if there is one",
            coll->rank, coll->ranks);
    }
}

ncclResult_t coll_test(void *request, int *done, int *size) {
    struct request *asked = request;
    bool complete = false;
    if (!asked || !done || !asked->work) return ncclInvalidArgument;
    *done = 0;
    netsum_status status = netsum_test(asked->work, &complete);
    if (status != NETSUM_OK) return failed(status, "test");
    if (!complete) return ncclSuccess;
    size_t bytes = asked->size;
    netsum_report report;
    struct coll *coll = asked->coll;
    status = netsum_wait(asked->work, &report);
    asked->work = NULL;
    atomic_store(&asked->used, false);
    /* All sums of such a block are NaN. Gradient scalers expect that, and no error. */
    if (status != NETSUM_OK && status != NETSUM_ERROR_NON_FINITE) {
        return failed(status, "all-reduce");
    }
    if (status == NETSUM_OK) note(coll, report.mode);
    *done = 1;
    if (size) *size = (int)bytes;
    return ncclSuccess;
}

ncclResult_t coll_close(void *comm) {
    struct coll *coll = comm;
    if (!coll) return ncclSuccess;
    netsum_finalize(coll->comm);
    for (int i = 0; i < NCCL_NET_MAX_REQUESTS; i++) {
        if (coll->requests[i].work) netsum_wait(coll->requests[i].work, NULL);
    }
    free(coll);
    return ncclSuccess;
}

ncclResult_t register_memory(void *comm, UNUSED void *data, UNUSED size_t size, int type,
                             void **handle) {
    if (!handle) return ncclInvalidArgument;
    *handle = NULL;
    if (type != NCCL_PTR_HOST) {
        LOG(WARN, "memory of type %d: only host memory is supported", type);
        return ncclInternalError; /* as NCCL's sockets: src/transport/net_socket.cc */
    }
    *handle = comm;
    return ncclSuccess;
}

ncclResult_t deregister_memory(UNUSED void *comm, UNUSED void *handle) {
    return ncclSuccess;
}
