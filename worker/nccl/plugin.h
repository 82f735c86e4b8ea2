/* NCCL's interface of network plugins, versions 8 to 12, as far as netsum uses it.
 *
 * Layouts follow these files; 2.30.7 has the same layouts in src/include/plugin/net/net_v*.h:
 *
 *   version  file                                       NCCL that prefers it
 *   8        v2.20.3-1 src/include/nccl_net.h           2.20 to 2.23
 *   9        v2.24.3-1 src/include/nccl_net.h           2.24, 2.25
 *   10       v2.26.2-1 src/include/plugin/net/net_v10.h 2.26, 2.27
 *   11       v2.28.3-1 src/include/plugin/net/net_v11.h 2.28, 2.29
 *   12       v2.30.3-1 src/include/plugin/net/net_v12.h 2.30 to 2.32
 *
 * Types and constants: types.h, err.h and common.h of v2.30.7-1 plugins/net/example/nccl, and
 * ncclRedOp_t in src/nccl.h.in. Pointers to structs that netsum does not read are void pointers. */
#ifndef NETSUM_NCCL_PLUGIN_H
#define NETSUM_NCCL_PLUGIN_H

#include <stdint.h>
#include <stdlib.h>

typedef enum {
    ncclSuccess = 0,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclRemoteError = 6,
} ncclResult_t;
typedef enum {
    ncclInt32 = 2,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
} ncclDataType_t;
typedef enum { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3 } ncclRedOp_t;

enum { NCCL_LOG_WARN = 2, NCCL_LOG_INFO = 3 };
enum { NCCL_INIT = 1, NCCL_NET = 16 };
enum { NCCL_PTR_HOST = 1, NCCL_PTR_CUDA = 2 };
enum { NCCL_NET_HANDLE_MAXSIZE = 128, NCCL_NET_MAX_REQUESTS = 32, NCCL_NET_ID_UNDEF = -1 };

typedef void (*ncclDebugLogger_t)(int level, unsigned long flags, const char *file, int line,
                                  const char *format, ...);

#define DEVICE_PORT                                                                                \
    int speed; /* Mb/s */                                                                          \
    int port;                                                                                      \
    float latency;                                                                                 \
    int maxComms, maxRecvs, netDeviceType, netDeviceVersion;
#define DEVICE(SLOTS)                                                                              \
    char *name, *pciPath;                                                                          \
    uint64_t guid;                                                                                 \
    int ptrSupport, regIsGlobal, forceFlush;                                                       \
    DEVICE_PORT                                                                                    \
    struct {                                                                                       \
        int ndevs, devs[SLOTS];                                                                    \
    } vProps;                                                                                      \
    size_t maxP2pBytes, maxCollBytes;

typedef struct {
    char *name, *pciPath;
    uint64_t guid;
    int ptrSupport, regIsGlobal;
    DEVICE_PORT
} properties_v8;
typedef struct { DEVICE(4) } properties_v9;
typedef properties_v9 properties_v10;
typedef struct { DEVICE(4) int maxMultiRequestSize; } properties_v11;
typedef struct { DEVICE(8) int maxMultiRequestSize; int16_t railId, planeId; } properties_v12;

/* Parameters and fields that not all versions have. */
#define LOGGER ncclDebugLogger_t log
#define CONTEXT void *context,
#define CREATE void **context, uint64_t comm,
#define CONFIG void *config,
#define PROFILER void *profiler,
#define PROFILERS void **profilers,
#define PROFILED , void *profiler
#define VIRTUAL ncclResult_t (*makeVDevice)(int *device, void *properties);
#define FINALIZE ncclResult_t (*finalize)(void *context);
#define SET_ATTRIBUTES ncclResult_t (*setNetAttr)(void *context, void *attributes);

/* The tables for sends: version, type of a size; the parameters of `init`; others of `listen` and
 * `connect`, of `connect`, of `isend` and of `irecv`; fields at the end. */
#define NET_VERSIONS(X)                                                                            \
    X(8, int, LOGGER, , , , , )                                                                    \
    X(9, size_t, LOGGER, , , , , VIRTUAL)                                                          \
    X(10, size_t, LOGGER PROFILED, , CONFIG, PROFILER, PROFILERS, VIRTUAL)                         \
    X(11, size_t, CREATE CONFIG LOGGER PROFILED, CONTEXT, , PROFILER, PROFILERS,                   \
      VIRTUAL FINALIZE SET_ATTRIBUTES)                                                             \
    X(12, size_t, CREATE CONFIG LOGGER PROFILED, CONTEXT, , PROFILER, PROFILERS,                   \
      VIRTUAL FINALIZE SET_ATTRIBUTES)

#define NET_TABLE(V, SIZE, INIT, LISTEN, CONNECT, SEND, RECEIVE, END)                              \
    typedef struct {                                                                               \
        const char *name;                                                                          \
        ncclResult_t (*init)(INIT);                                                                \
        ncclResult_t (*devices)(int *count);                                                       \
        ncclResult_t (*getProperties)(int device, properties_v##V *properties);                    \
        ncclResult_t (*listen)(LISTEN int device, void *handle, void **listener);                  \
        ncclResult_t (*connect)(LISTEN int device, CONNECT void *handle, void **send_comm,         \
                                void **offload);                                                   \
        ncclResult_t (*accept)(void *listener, void **recv_comm, void **device);                   \
        REGISTER                                                                                   \
        ncclResult_t (*isend)(void *comm, void *data, SIZE size, int tag, void *handle,            \
                              SEND void **request);                                                \
        ncclResult_t (*irecv)(void *comm, int n, void **data, SIZE *sizes, int *tags,              \
                              void **handles, RECEIVE void **request);                             \
        ncclResult_t (*iflush)(void *comm, int n, void **data, int *sizes, void **handles,         \
                               void **request);                                                    \
        ncclResult_t (*test)(void *request, int *done, int *sizes);                                \
        ncclResult_t (*closeSend)(void *comm);                                                     \
        ncclResult_t (*closeRecv)(void *comm);                                                     \
        ncclResult_t (*closeListen)(void *listener);                                               \
        ncclResult_t (*getDeviceMr)(void *comm, void *handle, void **device_handle);               \
        ncclResult_t (*irecvConsumed)(void *comm, int n, void *request);                           \
        END                                                                                        \
    } net_v##V;
#define REGISTER                                                                                   \
    ncclResult_t (*regMr)(void *comm, void *data, size_t size, int type, void **handle);           \
    ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset,    \
                                int fd, void **handle);                                            \
    ncclResult_t (*deregMr)(void *comm, void *handle);
NET_VERSIONS(NET_TABLE)

/* The tables for sums: version, type of a count; parameters of `init` before the logger; another of
 * `listen`; fields at the end. */
#define COLL_VERSIONS(X)                                                                           \
    X(8, int, , , )                                                                                \
    X(9, size_t, , , VIRTUAL)                                                                      \
    X(10, size_t, , , VIRTUAL)                                                                     \
    X(11, size_t, CREATE, CONTEXT, VIRTUAL FINALIZE)                                               \
    X(12, size_t, CREATE, CONTEXT, VIRTUAL FINALIZE)

#define COLL_TABLE(V, COUNT, INIT, LISTEN, END)                                                    \
    typedef struct {                                                                               \
        const char *name;                                                                          \
        ncclResult_t (*init)(INIT LOGGER);                                                         \
        ncclResult_t (*devices)(int *count);                                                       \
        ncclResult_t (*getProperties)(int device, properties_v##V *properties);                    \
        ncclResult_t (*listen)(LISTEN int device, void *handle, void **listener);                  \
        ncclResult_t (*connect)(void *handles[], int ranks, int rank, void *listener,              \
                                void **comm);                                                      \
        ncclResult_t (*reduceSupport)(ncclDataType_t type, ncclRedOp_t op, int *supported);        \
        REGISTER                                                                                   \
        ncclResult_t (*iallreduce)(void *comm, void *send, void *recv, COUNT count,                \
                                   ncclDataType_t type, ncclRedOp_t op, void *send_handle,         \
                                   void *recv_handle, void **request);                             \
        ncclResult_t (*iallgather)(void *comm, void *send, int n, void *parts,                     \
                                   size_t bytes_per_rank, size_t offset, size_t bytes,             \
                                   void *handle, void **request);                                  \
        ncclResult_t (*ireducescatter)(void *comm, int n, void *parts, void *recv,                 \
                                       size_t bytes_per_rank, size_t offset, size_t bytes,         \
                                       ncclDataType_t type, ncclRedOp_t op, void *handle,          \
                                       void **request);                                            \
        ncclResult_t (*iflush)(void *comm, void *data, int size, void *handle, void **request);    \
        ncclResult_t (*test)(void *request, int *done, int *size);                                 \
        ncclResult_t (*closeColl)(void *comm);                                                     \
        ncclResult_t (*closeListen)(void *listener);                                               \
        END                                                                                        \
    } coll_v##V;
COLL_VERSIONS(COLL_TABLE)

#endif
