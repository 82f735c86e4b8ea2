/* The functions behind the tables of all versions. */
#ifndef NETSUM_NCCL_INSIDE_H
#define NETSUM_NCCL_INSIDE_H

#include <net/if.h>
#include <netinet/in.h>

#include "plugin.h"

/* The one device: the interface on the route to the box. */
struct device {
    char name[IF_NAMESIZE];
    char *path; /* of its PCI device in /sys, or NULL */
    int speed;  /* Mb/s */
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } address;
    socklen_t length; /* of the address */
};
#define UNUSED __attribute__((unused))

extern struct device netsum_device;
extern ncclDebugLogger_t netsum_log;

#define LOG(level, ...)                                                                            \
    netsum_log(NCCL_LOG_##level, NCCL_INIT | NCCL_NET, __FILE__, __LINE__, "netsum: " __VA_ARGS__)

/* Finds the device, once. */
ncclResult_t device_init(ncclDebugLogger_t log);
ncclResult_t device_count(int *count);

/* coll.c */
ncclResult_t coll_listen(int device, void *handle, void **listener);
ncclResult_t coll_connect(void *handles[], int ranks, int rank, void *listener, void **comm);
ncclResult_t coll_reduce_support(ncclDataType_t type, ncclRedOp_t op, int *supported);
ncclResult_t coll_all_reduce(void *comm, void *send, void *recv, size_t count,
                             ncclDataType_t type, ncclRedOp_t op, void **request);
ncclResult_t coll_test(void *request, int *done, int *size);
ncclResult_t coll_close(void *comm);
ncclResult_t coll_close_listen(void *listener);

/* Of both: host memory needs no registration. */
ncclResult_t register_memory(void *comm, void *data, size_t size, int type, void **handle);
ncclResult_t deregister_memory(void *comm, void *handle);

/* sockets.c */
ncclResult_t net_listen(int device, void *handle, void **listener);
ncclResult_t net_connect(int device, void *handle, void **send_comm);
ncclResult_t net_accept(void *listener, void **recv_comm, void **offload);
/* Begins to send, or to receive at most `size` bytes: a connection has one direction. */
ncclResult_t net_begin(void *comm, void *data, size_t size, void **request);
ncclResult_t net_test(void *request, int *done, int *sizes);
ncclResult_t net_close(void *comm);
ncclResult_t net_close_listen(void *listener);

#endif
