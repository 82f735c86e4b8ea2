/* The device that NCCL sees: the interface on the route to the box. */
#define _GNU_SOURCE
#include <ifaddrs.h>
#include <limits.h>
#include <netdb.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "inside.h"

struct device netsum_device;
ncclDebugLogger_t netsum_log;

/* The host of HOST:PORT, [HOST]:PORT or HOST. */
static void host_of(const char *text, char *host, size_t room) {
    const char *begin = text + (*text == '['), *end = strpbrk(begin, "]");
    const char *colon = strchr(begin, ':');
    if (!end) end = colon && !strchr(colon + 1, ':') ? colon : begin + strlen(begin);
    snprintf(host, room, "%.*s", (int)(end - begin), begin);
}

/* Takes the address from which packets go to a host. */
static int route_to(const char *host) {
    struct addrinfo hints = {.ai_socktype = SOCK_DGRAM}, *found = NULL;
    if (getaddrinfo(host, "1", &hints, &found) != 0) return -1;
    int result = -1, fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    netsum_device.length = sizeof netsum_device.address;
    if (fd >= 0 && connect(fd, found->ai_addr, found->ai_addrlen) == 0) {
        result = getsockname(fd, &netsum_device.address.any, &netsum_device.length);
    }
    if (fd >= 0) close(fd);
    freeaddrinfo(found);
    return result;
}

/* The interface that has the device's address. */
static int name_interface(void) {
    struct ifaddrs *all = NULL;
    int result = -1;
    if (getifaddrs(&all) != 0) return -1;
    for (struct ifaddrs *at = all; at && result != 0; at = at->ifa_next) {
        const struct sockaddr *address = at->ifa_addr;
        const struct device *device = &netsum_device;
        if (!address || address->sa_family != device->address.any.sa_family) continue;
        const struct sockaddr_in *v4 = (const void *)address;
        const struct sockaddr_in6 *v6 = (const void *)address;
        if (address->sa_family == AF_INET
                ? v4->sin_addr.s_addr == device->address.v4.sin_addr.s_addr
                : memcmp(&v6->sin6_addr, &device->address.v6.sin6_addr, 16) == 0) {
            snprintf(netsum_device.name, sizeof netsum_device.name, "%s", at->ifa_name);
            result = 0;
        }
    }
    freeifaddrs(all);
    return result;
}

/* As NCCL's sockets: 10 Gb/s if the kernel does not know. */
static void read_sys(void) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "/sys/class/net/%s/device", netsum_device.name);
    netsum_device.path = realpath(path, NULL);
    snprintf(path, sizeof path, "/sys/class/net/%s/speed", netsum_device.name);
    FILE *file = fopen(path, "r");
    if (!file || fscanf(file, "%d", &netsum_device.speed) != 1) netsum_device.speed = 0;
    if (file) fclose(file);
    if (netsum_device.speed <= 0) netsum_device.speed = 10000;
}

static void find(void) {
    const char *controller = getenv("NETSUM_CONTROLLER"), *peers = getenv("NETSUM_PEERS");
    const char *to = controller && *controller ? controller : peers && *peers ? peers : "netsum";
    char host[256], first[256];
    snprintf(first, sizeof first, "%.*s", (int)strcspn(to, ","), to);
    host_of(first, host, sizeof host);
    if (route_to(host) != 0 || name_interface() != 0) {
        LOG(WARN, "no route to %s: set NETSUM_CONTROLLER to the box's address", host);
        return;
    }
    read_sys();
    LOG(INFO, "device %s, %d Mb/s", netsum_device.name, netsum_device.speed);
}

/* Without a device it fails, and NCCL uses its own transports. */
ncclResult_t device_init(ncclDebugLogger_t log) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    netsum_log = log;
    pthread_once(&once, find);
    return *netsum_device.name ? ncclSuccess : ncclSystemError;
}

ncclResult_t device_count(int *count) {
    *count = *netsum_device.name != 0;
    return ncclSuccess;
}
