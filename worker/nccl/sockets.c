/* Sends and receives for NCCL, over one TCP connection each.
 *
 * NCCL takes the tables for sends and for sums from the same plugin, and refuses one that has only
 * the latter: src/net.cc of 2.20, src/plugin/net.cc of 2.26 to 2.30. Its own sockets are not
 * exported. So these are the least that it needs for what the box does not sum.
 *
 * A message is its length, in 8 bytes, and its bytes. NCCL's hosts have one byte order. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "inside.h"

enum { HEAD = sizeof(uint64_t), PENDING = 16 };

struct comm;

struct message {
    struct comm *comm;
    char *data;
    uint64_t size; /* of the data: at a receiver first the room, then what has come */
    uint64_t head; /* the length, as sent */
    uint64_t moved; /* bytes of head and data */
    int used, done;
};

struct comm {
    int fd, sends;
    ncclResult_t error;
    pthread_mutex_t lock;
    unsigned first, next; /* messages in flight, in their order */
    struct message messages[NCCL_NET_MAX_REQUESTS];
};

static const char MAGIC[8] = "netsum1";

/* A handle. NCCL passes the same memory to connect until that is done, as its own sockets need. */
struct handle {
    char magic[sizeof MAGIC];
    uint64_t secret;
    socklen_t length;
    unsigned char address[sizeof(struct sockaddr_in6)];
    struct comm *connecting;
};
_Static_assert(sizeof(struct handle) <= NCCL_NET_HANDLE_MAXSIZE, "the handle is too large");

struct listener {
    int fd;
    uint64_t secret;
    int pending[PENDING]; /* connections that have not sent the secret yet, or -1 */
};

static ncclResult_t failed(const char *doing) {
    LOG(WARN, "%s: %s", doing, strerror(errno));
    return ncclSystemError;
}

static ncclResult_t open_comm(int fd, int sends, struct comm **comm) {
    int on = 1;
    *comm = calloc(1, sizeof **comm);
    if (!*comm || setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) {
        free(*comm);
        *comm = NULL;
        return failed("socket");
    }
    (*comm)->fd = fd;
    (*comm)->sends = sends;
    pthread_mutex_init(&(*comm)->lock, NULL);
    return ncclSuccess;
}

ncclResult_t net_listen(int device, void *handle, void **listener) {
    struct handle *mine = handle;
    const struct device *at = &netsum_device;
    if (device != 0 || !handle || !listener) return ncclInvalidArgument;
    memset(mine, 0, sizeof *mine);
    struct listener *made = calloc(1, sizeof *made);
    if (!made) return ncclSystemError;
    for (int i = 0; i < PENDING; i++) made->pending[i] = -1;
    memcpy(mine->magic, MAGIC, sizeof MAGIC);
    made->fd = socket(at->address.any.sa_family,
                      SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in6 address;
    memcpy(&address, &at->address, at->length);
    address.sin6_port = 0; /* where IPv4 has it, too */
    mine->length = at->length;
    if (made->fd < 0 || getrandom(&mine->secret, HEAD, 0) != HEAD
        || bind(made->fd, (struct sockaddr *)&address, at->length) != 0
        || listen(made->fd, 128) != 0
        || getsockname(made->fd, (struct sockaddr *)&address, &mine->length) != 0) {
        ncclResult_t result = failed("listen");
        if (made->fd >= 0) close(made->fd);
        free(made);
        return result;
    }
    memcpy(mine->address, &address, mine->length);
    made->secret = mine->secret;
    *listener = made;
    return ncclSuccess;
}

ncclResult_t net_connect(int device, void *handle, void **send_comm) {
    struct handle *to = handle;
    *send_comm = NULL;
    if (device != 0) return ncclInvalidArgument;
    if (memcmp(to->magic, MAGIC, sizeof MAGIC) != 0 || to->length > sizeof to->address) {
        LOG(WARN, "the other rank uses another plugin: all hosts must reach the box, or none");
        return ncclInvalidArgument;
    }
    if (!to->connecting) {
        struct sockaddr_in6 address;
        memcpy(&address, to->address, to->length);
        int fd = socket(address.sin6_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (fd < 0) return failed("socket");
        if (connect(fd, (struct sockaddr *)&address, to->length) != 0 && errno != EINPROGRESS) {
            ncclResult_t result = failed("connect");
            close(fd);
            return result;
        }
        ncclResult_t result = open_comm(fd, 1, &to->connecting);
        if (result != ncclSuccess) {
            close(fd);
            return result;
        }
    }
    struct pollfd ready = {.fd = to->connecting->fd, .events = POLLOUT};
    if (poll(&ready, 1, 0) <= 0) return ncclSuccess; /* NCCL calls again */
    struct comm *comm = to->connecting;
    to->connecting = NULL;
    socklen_t room = sizeof errno;
    if (getsockopt(comm->fd, SOL_SOCKET, SO_ERROR, &errno, &room) != 0 || errno != 0
        || send(comm->fd, &to->secret, HEAD, MSG_NOSIGNAL) != HEAD) {
        ncclResult_t result = failed("connect");
        net_close(comm);
        return result;
    }
    *send_comm = comm;
    return ncclSuccess;
}

/* Takes new connections in place of the oldest ones. */
static ncclResult_t take_new(struct listener *at) {
    int fd;
    while ((fd = accept4(at->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        if (at->pending[0] >= 0) close(at->pending[0]);
        memmove(at->pending, at->pending + 1, sizeof at->pending - sizeof at->pending[0]);
        at->pending[PENDING - 1] = fd;
    }
    /* Other errors are those of a connection: accept(2). */
    int fatal = errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
    return fatal || errno == EBADF || errno == EINVAL ? failed("accept") : ncclSuccess;
}

ncclResult_t net_accept(void *listener, void **recv_comm, UNUSED void **offload) {
    struct listener *at = listener;
    uint64_t secret;
    *recv_comm = NULL;
    ncclResult_t result = take_new(at);
    for (int i = 0; i < PENDING && result == ncclSuccess && !*recv_comm; i++) {
        int fd = at->pending[i];
        if (fd < 0) continue;
        ssize_t got = recv(fd, &secret, HEAD, MSG_PEEK);
        /* A part is not judged, or it could be guessed byte by byte. */
        if ((got < 0 && errno == EAGAIN) || (got > 0 && got < HEAD)) continue;
        at->pending[i] = -1;
        struct comm *comm;
        if (got != HEAD || secret != at->secret || recv(fd, &secret, HEAD, 0) != HEAD) {
            close(fd);
        } else if ((result = open_comm(fd, 0, &comm)) == ncclSuccess) {
            *recv_comm = comm;
        } else {
            close(fd);
        }
    }
    return result;
}

ncclResult_t net_begin(void *on, void *data, size_t size, void **request) {
    struct comm *comm = on;
    *request = NULL;
    if (size > PTRDIFF_MAX) return ncclInvalidArgument; /* it was negative */
    pthread_mutex_lock(&comm->lock);
    struct message *message = &comm->messages[comm->next % NCCL_NET_MAX_REQUESTS];
    if (!message->used) {
        *message = (struct message){
            .comm = comm, .data = data, .size = size, .head = size, .used = 1};
        comm->next++;
        *request = message; /* else NCCL calls again */
    }
    pthread_mutex_unlock(&comm->lock);
    return ncclSuccess;
}

/* Moves bytes until the socket would block. */
static ncclResult_t move(struct comm *comm, struct message *at) {
    for (;;) {
        int in_head = at->moved < HEAD;
        char *from = in_head ? (char *)&at->head + at->moved : at->data + (at->moved - HEAD);
        size_t left = in_head ? HEAD - at->moved : HEAD + at->size - at->moved;
        if (!left) break;
        ssize_t moved = comm->sends
            ? send(comm->fd, from, left, MSG_NOSIGNAL | (in_head && at->size ? MSG_MORE : 0))
            : recv(comm->fd, from, left, 0);
        if (moved < 0 && errno == EAGAIN) return ncclSuccess;
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0 && errno != ECONNRESET && errno != EPIPE) return failed("socket");
        if (moved <= 0) {
            LOG(WARN, "socket: the peer has closed the connection");
            return ncclRemoteError;
        }
        at->moved += (uint64_t)moved;
        if (in_head && at->moved == HEAD && !comm->sends) {
            if (at->head > at->size) {
                LOG(WARN, "socket: %zu bytes for a buffer of %zu", (size_t)at->head,
                    (size_t)at->size);
                return ncclInvalidArgument;
            }
            at->size = at->head;
        }
    }
    at->done = 1;
    return ncclSuccess;
}

ncclResult_t net_test(void *request, int *done, int *sizes) {
    struct message *asked = request;
    struct comm *comm = asked->comm;
    *done = 0;
    pthread_mutex_lock(&comm->lock);
    while (comm->error == ncclSuccess && comm->first != comm->next) {
        struct message *at = &comm->messages[comm->first % NCCL_NET_MAX_REQUESTS];
        comm->error = move(comm, at);
        if (!at->done) break;
        comm->first++;
    }
    if (asked->done) {
        if (sizes) *sizes = (int)asked->size;
        asked->used = 0;
        *done = 1;
    }
    ncclResult_t result = *done ? ncclSuccess : comm->error;
    pthread_mutex_unlock(&comm->lock);
    return result;
}

ncclResult_t net_close(void *comm) {
    struct comm *closed = comm;
    if (!closed) return ncclSuccess;
    close(closed->fd);
    pthread_mutex_destroy(&closed->lock);
    free(closed);
    return ncclSuccess;
}

ncclResult_t net_close_listen(void *listener) {
    struct listener *closed = listener;
    if (!closed) return ncclSuccess;
    close(closed->fd);
    for (int i = 0; i < PENDING; i++)
        if (closed->pending[i] >= 0) close(closed->pending[i]);
    free(closed);
    return ncclSuccess;
}
