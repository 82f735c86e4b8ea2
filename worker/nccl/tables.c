/* The tables that NCCL looks up by name. Where versions differ, it is in the functions here. */
#include "inside.h"

#define EXPORT __attribute__((visibility("default")))
/* Neither contexts, which NCCL starts as NULL, nor configurations, tags, profilers and handles of
 * memory are needed. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

/* The most bytes of a call: what NCCL assumes for plugins of version 8 (MAX_NET_SIZE and
 * MAX_COLLNET_SIZE in its src/include/plugin/nccl_net.h). */
static const size_t MOST_NET = 1 << 30, MOST_COLL = 1 << 29;

#define PROPERTIES(V, ...)                                                                         \
    static ncclResult_t properties_of_v##V(int device, properties_v##V *properties) {              \
        if (device != 0) return ncclInvalidArgument;                                               \
        *properties = (properties_v##V){                                                           \
            .name = netsum_device.name, .pciPath = netsum_device.path,                             \
            .ptrSupport = NCCL_PTR_HOST, .speed = netsum_device.speed, .maxComms = 65536,          \
            .maxRecvs = 1, __VA_ARGS__};                                                           \
        return ncclSuccess;                                                                        \
    }
#define OF_V9 .vProps.ndevs = 1, .maxP2pBytes = MOST_NET, .maxCollBytes = MOST_COLL
#define OF_V11 OF_V9, .maxMultiRequestSize = 1
PROPERTIES(8, )
PROPERTIES(9, OF_V9)
PROPERTIES(10, OF_V9)
PROPERTIES(11, OF_V11)
PROPERTIES(12, OF_V11, .railId = NCCL_NET_ID_UNDEF, .planeId = NCCL_NET_ID_UNDEF)

static ncclResult_t finalize(void *context) {
    return ncclSuccess;
}

/* The field of that name, where a version has it. */
#undef VIRTUAL
#define VIRTUAL
#undef FINALIZE
#define FINALIZE .finalize = finalize,
#undef SET_ATTRIBUTES
#define SET_ATTRIBUTES

/* maxRecvs is 1, and so is n. */
#define NET(V, SIZE, INIT, LISTEN, CONNECT, SEND, RECEIVE, END)                                    \
    static ncclResult_t net_init_v##V(INIT) {                                                      \
        return device_init(log);                                                                   \
    }                                                                                              \
    static ncclResult_t net_listen_v##V(LISTEN int device, void *handle, void **listener) {        \
        return net_listen(device, handle, listener);                                               \
    }                                                                                              \
    static ncclResult_t net_connect_v##V(LISTEN int device, CONNECT void *handle, void **comm,     \
                                         void **offload) {                                         \
        return net_connect(device, handle, comm);                                                  \
    }                                                                                              \
    static ncclResult_t net_send_v##V(void *comm, void *data, SIZE size, int tag, void *handle,    \
                                      SEND void **request) {                                       \
        return net_begin(comm, data, (size_t)size, request);                                       \
    }                                                                                              \
    static ncclResult_t net_receive_v##V(void *comm, int n, void **data, SIZE *sizes, int *tags,   \
                                         void **handles, RECEIVE void **request) {                 \
        return n != 1 ? ncclInvalidArgument : net_begin(comm, *data, (size_t)*sizes, request);     \
    }                                                                                              \
    EXPORT const net_v##V ncclNetPlugin_v##V = {                                                   \
        .name = "netsum", .init = net_init_v##V, .devices = device_count,                          \
        .getProperties = properties_of_v##V, .listen = net_listen_v##V,                            \
        .connect = net_connect_v##V, .accept = net_accept, .regMr = register_memory,               \
        .deregMr = deregister_memory, .isend = net_send_v##V, .irecv = net_receive_v##V,           \
        .test = net_test, .closeSend = net_close, .closeRecv = net_close,                          \
        .closeListen = net_close_listen, END};
NET_VERSIONS(NET)

/* NCCL uses its own rings instead of iallgather and ireducescatter that are NULL
 * (src/graph/tuning.cc, 2.20 to 2.30), and does without the other fields that are not set here. */
#define COLL(V, COUNT, INIT, LISTEN, END)                                                          \
    static ncclResult_t coll_init_v##V(INIT LOGGER) {                                              \
        return device_init(log);                                                                   \
    }                                                                                              \
    static ncclResult_t coll_listen_v##V(LISTEN int device, void *handle, void **listener) {       \
        return coll_listen(device, handle, listener);                                              \
    }                                                                                              \
    static ncclResult_t coll_all_reduce_v##V(void *comm, void *send, void *recv, COUNT count,      \
                                             ncclDataType_t type, ncclRedOp_t op, void *unused,    \
                                             void *unused_too, void **request) {                   \
        return coll_all_reduce(comm, send, recv, (size_t)count, type, op, request);                \
    }                                                                                              \
    EXPORT const coll_v##V ncclCollNetPlugin_v##V = {                                              \
        .name = "netsum", .init = coll_init_v##V, .devices = device_count,                         \
        .getProperties = properties_of_v##V, .listen = coll_listen_v##V, .connect = coll_connect,  \
        .reduceSupport = coll_reduce_support, .regMr = register_memory,                            \
        .deregMr = deregister_memory, .iallreduce = coll_all_reduce_v##V, .test = coll_test,       \
        .closeColl = coll_close, .closeListen = coll_close_listen, END};
COLL_VERSIONS(COLL)
