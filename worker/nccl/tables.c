/* The tables that NCCL looks up by name. Where versions differ, it is in the functions here. */
#include <string.h>

#include "inside.h"

#define EXPORT __attribute__((visibility("default")))

/* The most bytes of a call: what NCCL assumes for plugins of version 8 (MAX_NET_SIZE and
 * MAX_COLLNET_SIZE in its src/include/plugin/nccl_net.h). */
static const size_t MOST_NET = 1 << 30, MOST_COLL = 1 << 29;

#define FILL_V8(p)                                                                                 \
    if (device != 0) return ncclInvalidArgument;                                                   \
    memset(p, 0, sizeof *(p));                                                                     \
    (p)->name = netsum_device.name, (p)->pciPath = netsum_device.path;                             \
    (p)->ptrSupport = NCCL_PTR_HOST, (p)->speed = netsum_device.speed;                             \
    (p)->maxComms = 65536, (p)->maxRecvs = 1
#define FILL_V9(p)                                                                                 \
    FILL_V8(p);                                                                                    \
    (p)->vProps.ndevs = 1, (p)->maxP2pBytes = MOST_NET, (p)->maxCollBytes = MOST_COLL

static ncclResult_t properties_of_v8(int device, properties_v8 *p) {
    FILL_V8(p);
    return ncclSuccess;
}

static ncclResult_t properties_of_v9(int device, properties_v9 *p) {
    FILL_V9(p);
    return ncclSuccess;
}

static ncclResult_t properties_of_v11(int device, properties_v11 *p) {
    FILL_V9(p);
    p->maxMultiRequestSize = 1;
    return ncclSuccess;
}

static ncclResult_t properties_of_v12(int device, properties_v12 *p) {
    FILL_V9(p);
    p->maxMultiRequestSize = 1;
    p->railId = p->planeId = NCCL_NET_ID_UNDEF;
    return ncclSuccess;
}

/* The context, which NCCL starts as NULL, is not needed, nor are tags, profilers and handles of
 * memory. maxRecvs is 1, and so is n. */
static ncclResult_t init_net_v10(ncclDebugLogger_t log, UNUSED void *profiler) {
    return device_init(log);
}

static ncclResult_t init_net_v11(UNUSED void **context, UNUSED uint64_t comm, UNUSED void *config,
                                 ncclDebugLogger_t log, UNUSED void *profiler) {
    return device_init(log);
}

static ncclResult_t init_coll_v11(UNUSED void **context, UNUSED uint64_t comm,
                                  ncclDebugLogger_t log) {
    return device_init(log);
}

static ncclResult_t finalize(UNUSED void *context) {
    return ncclSuccess;
}

static ncclResult_t net_listen_v11(UNUSED void *context, int device, void *handle,
                                   void **listener) {
    return net_listen(device, handle, listener);
}

static ncclResult_t coll_listen_v11(UNUSED void *context, int device, void *handle,
                                    void **listener) {
    return coll_listen(device, handle, listener);
}

static ncclResult_t net_connect_v10(int device, UNUSED void *config, void *handle, void **comm,
                                    void **offload) {
    return net_connect(device, handle, comm, offload);
}

static ncclResult_t net_connect_v11(UNUSED void *context, int device, void *handle, void **comm,
                                    void **offload) {
    return net_connect(device, handle, comm, offload);
}

static ncclResult_t send_v8(void *comm, void *data, int size, UNUSED int tag, UNUSED void *handle,
                            void **request) {
    return size < 0 ? ncclInvalidArgument : net_begin(comm, data, (size_t)size, request);
}

static ncclResult_t send_v9(void *comm, void *data, size_t size, UNUSED int tag,
                            UNUSED void *handle, void **request) {
    return net_begin(comm, data, size, request);
}

static ncclResult_t send_v10(void *comm, void *data, size_t size, UNUSED int tag,
                             UNUSED void *handle, UNUSED void *profiler, void **request) {
    return net_begin(comm, data, size, request);
}

static ncclResult_t receive_v8(void *comm, int n, void **data, int *sizes, UNUSED int *tags,
                               UNUSED void **handles, void **request) {
    if (n != 1 || sizes[0] < 0) return ncclInvalidArgument;
    return net_begin(comm, data[0], (size_t)sizes[0], request);
}

static ncclResult_t receive_v9(void *comm, int n, void **data, size_t *sizes, UNUSED int *tags,
                               UNUSED void **handles, void **request) {
    return n != 1 ? ncclInvalidArgument : net_begin(comm, data[0], sizes[0], request);
}

static ncclResult_t receive_v10(void *comm, int n, void **data, size_t *sizes, int *tags,
                                void **handles, UNUSED void **profilers, void **request) {
    return receive_v9(comm, n, data, sizes, tags, handles, request);
}

static ncclResult_t all_reduce_v8(void *comm, void *send, void *recv, int count,
                                  ncclDataType_t type, ncclRedOp_t op, void *send_handle,
                                  void *recv_handle, void **request) {
    return count < 0 ? ncclInvalidArgument
                     : coll_all_reduce(comm, send, recv, (size_t)count, type, op, send_handle,
                                       recv_handle, request);
}

#define NET(V, ...)                                                                                \
    EXPORT const net_v##V ncclNetPlugin_v##V = {                                                   \
        .name = "netsum", .devices = device_count, .accept = net_accept,                           \
        .regMr = register_memory, .deregMr = deregister_memory, .test = net_test,                  \
        .closeSend = net_close, .closeRecv = net_close, .closeListen = net_close_listen,           \
        __VA_ARGS__};
#define COLL(V, TABLE, ...)                                                                        \
    EXPORT const TABLE ncclCollNetPlugin_v##V = {                                                  \
        .name = "netsum", .devices = device_count, .connect = coll_connect,                        \
        .reduceSupport = coll_reduce_support, .regMr = register_memory,                            \
        .deregMr = deregister_memory, .test = coll_test, .closeColl = coll_close,                  \
        .closeListen = coll_close_listen, __VA_ARGS__};

/* NCCL uses its own rings instead of iallgather and ireducescatter that are NULL
 * (src/graph/tuning.cc, 2.20 to 2.30), and does without the other fields that are not set here. */
#define COLL_V11                                                                                   \
    .init = init_coll_v11, .listen = coll_listen_v11, .iallreduce = coll_all_reduce,               \
    .finalize = finalize
#define NET_V11                                                                                    \
    .init = init_net_v11, .listen = net_listen_v11, .connect = net_connect_v11,                    \
    .isend = send_v10, .irecv = receive_v10, .finalize = finalize

NET(8, .init = device_init, .getProperties = properties_of_v8, .listen = net_listen,
    .connect = net_connect, .isend = send_v8, .irecv = receive_v8)
NET(9, .init = device_init, .getProperties = properties_of_v9, .listen = net_listen,
    .connect = net_connect, .isend = send_v9, .irecv = receive_v9)
NET(10, .init = init_net_v10, .getProperties = properties_of_v9, .listen = net_listen,
    .connect = net_connect_v10, .isend = send_v10, .irecv = receive_v10)
NET(11, .getProperties = properties_of_v11, NET_V11)
NET(12, .getProperties = properties_of_v12, NET_V11)

COLL(8, coll_v8, .init = device_init, .getProperties = properties_of_v8, .listen = coll_listen,
     .iallreduce = all_reduce_v8)
COLL(9, coll_v9, .init = device_init, .getProperties = properties_of_v9, .listen = coll_listen,
     .iallreduce = coll_all_reduce)
COLL(10, coll_v9, .init = device_init, .getProperties = properties_of_v9, .listen = coll_listen,
     .iallreduce = coll_all_reduce)
COLL(11, coll_v11, .getProperties = properties_of_v11, COLL_V11)
COLL(12, coll_v12, .getProperties = properties_of_v12, COLL_V11)
