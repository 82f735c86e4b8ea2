/* Loads the plugin by its symbols, as NCCL does, and drives it as one of several ranks.
 *
 *     drive PLUGIN VERSION CASE RANK RANKS [PLACES]
 *
 * Ranks exchange handles through the test that has started them: each prints a line, and reads a
 * line with those of all. PLACES are those of NCCL's own functions in the library of
 * NETSUM_TEST_NCCL that open a plugin, and read the tables for sends and sums. They do it
 * instead of the ones here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../plugin.h"

#define UNUSED __attribute__((unused))
#define ASSERT(x) ((x) ? (void)0 : failed(__LINE__, #x))

static void failed(int line, const char *what) {
    fprintf(stderr, "line %d: %s\n", line, what);
    exit(1);
}

enum { FLIGHT = 8, COUNT = 6000, MOST_RANKS = 8 };

static const coll_v12 *coll;
static const net_v12 *net;
static void *context, *net_context;
static int rank, ranks;

/* Keeps the warnings, and shows all. */
static char warnings[1 << 16];

static void logger(int level, unsigned long flags, const char *file, int line, const char *format,
                   ...) {
    char text[1024];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    fprintf(stderr, "%d %lx %s:%d %s\n", level, flags, file, line, text);
    if (level == NCCL_LOG_WARN && strlen(warnings) + strlen(text) < sizeof warnings) {
        strcat(warnings, text);
    }
}

static int warned(const char *word) {
    int found = strstr(warnings, word) != NULL;
    *warnings = 0;
    return found;
}

/* Adapters of versions 8 to 11 to 12, as in NCCL's src/plugin/net/net_v8.cc to net_v11.cc. */
static const void *old_coll, *old_net;
static int version;
#define NET(V) ((const net_v##V *)old_net)
#define COLL(V) ((const coll_v##V *)old_coll)
#define OLD(TABLE, CALL)                                                                           \
    (version == 8 ? TABLE(8)->CALL : version == 9 ? TABLE(9)->CALL : TABLE(10)->CALL)

static ncclResult_t coll_init(UNUSED void **unused, UNUSED uint64_t comm, ncclDebugLogger_t log) {
    return OLD(COLL, init(log));
}
static ncclResult_t coll_listen(UNUSED void *unused, int device, void *handle, void **listener) {
    return OLD(COLL, listen(device, handle, listener));
}
static ncclResult_t coll_sum(void *comm, void *send, void *recv, size_t count, ncclDataType_t type,
                             ncclRedOp_t op, void *a, void *b, void **request) {
    return version == 8
        ? COLL(8)->iallreduce(comm, send, recv, (int)count, type, op, a, b, request)
        : COLL(9)->iallreduce(comm, send, recv, count, type, op, a, b, request);
}
static ncclResult_t finalize(UNUSED void *unused) {
    return ncclSuccess;
}
static ncclResult_t properties(int device, properties_v12 *all) {
    memset(all, 0, sizeof *all);
    all->maxCollBytes = 1; /* not of version 8 */
#define TAKE(P)                                                                                    \
    all->name = P.name, all->ptrSupport = P.ptrSupport, all->speed = P.speed,                      \
    all->maxComms = P.maxComms, all->maxRecvs = P.maxRecvs, all->pciPath = P.pciPath
    properties_v8 p8;
    properties_v9 p9;
    properties_v11 p11;
    if (version == 8) {
        ASSERT(COLL(8)->getProperties(device, &p8) == ncclSuccess);
        TAKE(p8);
    } else if (version < 11) {
        ASSERT(COLL(9)->getProperties(device, &p9) == ncclSuccess);
        TAKE(p9), all->maxCollBytes = p9.maxCollBytes;
        ASSERT(p9.vProps.ndevs == 1 && p9.vProps.devs[0] == 0 && p9.maxP2pBytes > 0);
    } else {
        ASSERT(COLL(11)->getProperties(device, &p11) == ncclSuccess);
        TAKE(p11), all->maxCollBytes = p11.maxCollBytes;
        ASSERT(p11.maxMultiRequestSize == 1);
    }
    return ncclSuccess;
}
static ncclResult_t net_init(UNUSED void **unused, UNUSED uint64_t comm, UNUSED void *config,
                             ncclDebugLogger_t log, void *profiler) {
    return version == 8   ? NET(8)->init(log)
           : version == 9 ? NET(9)->init(log)
                          : NET(10)->init(log, profiler);
}
static ncclResult_t net_listen(UNUSED void *unused, int device, void *handle, void **listener) {
    return OLD(NET, listen(device, handle, listener));
}
static ncclResult_t net_connect(UNUSED void *unused, int device, void *handle, void **comm,
                                void **offload) {
    int config = -1;
    return version == 10
        ? NET(10)->connect(device, &config, handle, comm, offload)
        : NET(9)->connect(device, handle, comm, offload);
}
static ncclResult_t net_send(void *comm, void *data, size_t size, int tag, void *handle,
                             void *profiler, void **request) {
    return version == 8   ? NET(8)->isend(comm, data, (int)size, tag, handle, request)
           : version == 9 ? NET(9)->isend(comm, data, size, tag, handle, request)
                          : NET(10)->isend(comm, data, size, tag, handle, profiler, request);
}
static ncclResult_t net_receive(void *comm, int n, void **data, size_t *sizes, int *tags,
                                void **handles, void **profilers, void **request) {
    int size = (int)*sizes;
    return version == 8   ? NET(8)->irecv(comm, n, data, &size, tags, handles, request)
           : version == 9 ? NET(9)->irecv(comm, n, data, sizes, tags, handles, request)
                          : NET(10)->irecv(comm, n, data, sizes, tags, handles, profilers, request);
}

static void load(const char *plugin) {
    char name[64];
    void *library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
    if (!library) fprintf(stderr, "%s\n", dlerror());
    ASSERT(library);
    snprintf(name, sizeof name, "ncclCollNetPlugin_v%d", version);
    ASSERT((old_coll = dlsym(library, name)));
    snprintf(name, sizeof name, "ncclNetPlugin_v%d", version);
    ASSERT((old_net = dlsym(library, name)));
    static coll_v12 made_coll;
    static net_v12 made_net;
#define SHARED(T)                                                                                  \
    made_coll.name = T->name, made_coll.devices = T->devices, made_coll.connect = T->connect,      \
    made_coll.reduceSupport = T->reduceSupport, made_coll.regMr = T->regMr,                        \
    made_coll.deregMr = T->deregMr, made_coll.iflush = T->iflush, made_coll.test = T->test,        \
    made_coll.closeColl = T->closeColl, made_coll.closeListen = T->closeListen,                    \
    made_coll.iallgather = T->iallgather, made_coll.ireducescatter = T->ireducescatter
#define SHARED_NET(T)                                                                              \
    made_net.name = T->name, made_net.devices = T->devices, made_net.accept = T->accept,           \
    made_net.regMr = T->regMr, made_net.deregMr = T->deregMr, made_net.test = T->test,             \
    made_net.closeSend = T->closeSend, made_net.closeRecv = T->closeRecv,                          \
    made_net.closeListen = T->closeListen
    const coll_v8 *c8 = old_coll;
    const coll_v9 *c9 = old_coll;
    const coll_v11 *c11 = old_coll;
    const net_v8 *n8 = old_net;
    const net_v9 *n9 = old_net;
    const net_v10 *n10 = old_net;
    const net_v11 *n11 = old_net;
    made_coll.init = coll_init, made_coll.listen = coll_listen, made_coll.iallreduce = coll_sum;
    made_coll.getProperties = properties, made_coll.finalize = finalize;
    made_net.init = net_init, made_net.listen = net_listen, made_net.connect = net_connect;
    made_net.isend = net_send, made_net.irecv = net_receive, made_net.finalize = finalize;
    switch (version) {
    case 8: SHARED(c8), SHARED_NET(n8); break;
    case 9: SHARED(c9), SHARED_NET(n9); break;
    case 10: SHARED(c9), SHARED_NET(n10); break;
    case 11:
        SHARED(c11), SHARED_NET(n11);
        made_coll.init = c11->init, made_coll.listen = c11->listen;
        made_coll.iallreduce = c11->iallreduce, made_coll.finalize = c11->finalize;
        made_net.init = n11->init, made_net.listen = n11->listen, made_net.connect = n11->connect;
        made_net.isend = n11->isend, made_net.irecv = n11->irecv;
        made_net.finalize = n11->finalize;
        break;
    default: coll = old_coll, net = old_net; return;
    }
    coll = &made_coll, net = &made_net;
}

/* Opens the plugin by NCCL's own functions, from the value of NCCL_NET_PLUGIN, and loads the
 * tables. */
static void load_as_nccl(const char *plugin, char **places) {
    void *nccl = dlopen(getenv("NETSUM_TEST_NCCL"), RTLD_NOW | RTLD_LOCAL);
    struct link_map *map = NULL;
    ASSERT(nccl && dlinfo(nccl, RTLD_DI_LINKMAP, &map) == 0);
    union {
        uintptr_t place;
        void *(*open)(const char *name);
        const void *(*get)(void *library);
    } functions[3];
    for (int i = 0; i < 3; i++) functions[i].place = map->l_addr + strtoul(places[i], NULL, 16);
    void *library = functions[0].open(plugin);
    ASSERT(library);
    net = functions[1].get(library);
    coll = functions[2].get(library);
}

/* Sends this rank's bytes, and returns those of all; also a barrier. */
static void exchange(const void *mine, size_t size, unsigned char (*all)[NCCL_NET_HANDLE_MAXSIZE]) {
    for (size_t i = 0; i < size; i++) printf("%02x", ((const unsigned char *)mine)[i]);
    printf("\n");
    fflush(stdout);
    for (int r = 0; r < ranks; r++) {
        char word[2 * NCCL_NET_HANDLE_MAXSIZE + 1];
        ASSERT(scanf("%256s", word) == 1 && strlen(word) == 2 * size);
        for (size_t i = 0; i < size; i++) ASSERT(sscanf(word + 2 * i, "%2hhx", &all[r][i]) == 1);
    }
}

static unsigned char handles[MOST_RANKS][NCCL_NET_HANDLE_MAXSIZE];

static void together(void) {
    exchange("x", 1, handles);
}

/* Connects all ranks, or those of the same half. */
static void *connected(int halves, int fails) {
    unsigned char mine[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL, *comm = NULL, *pointers[MOST_RANKS];
    ASSERT(coll->listen(context, 0, mine, &listener) == ncclSuccess && listener);
    exchange(mine, sizeof mine, handles);
    int members = halves ? ranks / 2 : ranks, first = halves ? rank / members * members : 0;
    for (int r = 0; r < members; r++) pointers[r] = handles[first + r];
    ncclResult_t result = coll->connect(pointers, members, rank - first, listener, &comm);
    ASSERT((result != ncclSuccess) == fails && (comm == NULL) == fails);
    ASSERT(coll->closeListen(listener) == ncclSuccess);
    return comm;
}

/* As NCCL's proxy thread, which yields when it has nothing to do. */
static ncclResult_t coll_test(void *request, int *done, int *size) {
    sched_yield();
    return coll->test(request, done, size);
}

static float data[2][NCCL_NET_MAX_REQUESTS][COUNT];

static void *begin(void *comm, int i, int in_place) {
    void *request = NULL;
    for (int n = 0; n < COUNT; n++) data[0][i][n] = (float)((rank + 1) * (i + 1) + n % 7);
    ASSERT(coll->iallreduce(comm, data[0][i], in_place ? data[0][i] : data[1][i], COUNT,
                            ncclFloat32, ncclSum, NULL, NULL, &request) == ncclSuccess);
    return request;
}

static void finish(void *request) {
    int done = 0, size = 0;
    while (!done) ASSERT(coll_test(request, &done, &size) == ncclSuccess);
    ASSERT(size == COUNT * (int)sizeof(float));
}

/* Whether the sums of `members` ranks from `first` are right. */
static void check(int i, int in_place, int first, int members) {
    int total = 0;
    for (int r = first; r < first + members; r++) total += r + 1;
    const float *sums = data[in_place ? 0 : 1][i];
    for (int n = 0; n < COUNT; n++) {
        float sum = (float)(total * (i + 1) + members * (n % 7));
        ASSERT(sums[n] == sum);
    }
}

/* Several requests in flight, tested from the last to the first. */
static void sums(void *comm) {
    void *requests[FLIGHT];
    for (int in_place = 0; in_place < 2; in_place++) {
        for (int i = 0; i < FLIGHT; i++) ASSERT((requests[i] = begin(comm, i, in_place)));
        for (int i = FLIGHT - 1; i >= 0; i--) finish(requests[i]), check(i, in_place, 0, ranks);
    }
}

static void types(void *comm) {
    static const ncclDataType_t OTHERS[] = {ncclInt32, ncclFloat16, ncclBfloat16};
    int total = ranks * (ranks + 1) / 2;
    for (int t = 0; t < 3; t++) {
        int32_t integers[5] = {0};
        uint16_t halves[5] = {0};
        /* 1, 2, ... as halves: 1.0 is 0x3c00, and its powers of two are 0x400 apart. */
        static const uint16_t NUMBERS[2][5] = {{0, 0x3c00, 0x4000, 0x4200, 0x4400},
                                               {0, 0x3f80, 0x4000, 0x4040, 0x4080}};
        static const uint16_t SUMS[2] = {0x4900, 0x4120}; /* 10 */
        ASSERT(ranks == 4);
        for (int n = 0; n < 5; n++) {
            integers[n] = n - 2 + rank, halves[n] = NUMBERS[t == 2][rank + 1];
        }
        void *request = NULL, *at = t == 0 ? (void *)integers : halves;
        int done = 0;
        ASSERT(coll->iallreduce(comm, at, at, 5, OTHERS[t], ncclSum, NULL, NULL, &request)
               == ncclSuccess);
        while (!done) ASSERT(coll_test(request, &done, NULL) == ncclSuccess);
        for (int n = 0; n < 5; n++) {
            ASSERT(t == 0 ? integers[n] == ranks * (n - 2) + total - ranks
                          : halves[n] == SUMS[t - 1]);
        }
    }
    /* An infinity is no error: NCCL's users expect it in the sum, or a NaN. */
    void *request = NULL;
    int done = 0;
    for (int n = 0; n < COUNT; n++) data[0][0][n] = n < 1024 && rank == 1 ? 1.0f / 0.0f : 1.0f;
    ASSERT(coll->iallreduce(comm, data[0][0], data[1][0], COUNT, ncclFloat32, ncclSum, NULL, NULL,
                            &request) == ncclSuccess);
    while (!done) ASSERT(coll_test(request, &done, NULL) == ncclSuccess);
    ASSERT(!(data[1][0][0] < 1e38f) && data[1][0][COUNT - 1] == (float)ranks);
}

/* More requests than there are places for. */
static void busy(void *comm) {
    void *requests[NCCL_NET_MAX_REQUESTS];
    for (int i = 0; i < NCCL_NET_MAX_REQUESTS; i++) ASSERT((requests[i] = begin(comm, i, 0)));
    ASSERT(!begin(comm, 0, 1));
    for (int i = 0; i < NCCL_NET_MAX_REQUESTS; i++) {
        /* begin() has written the input of number 0 again, which has been copied. */
        finish(requests[i]), check(i, 0, 0, ranks);
    }
}

static void wrong(void *comm) {
    unsigned char handle[NCCL_NET_HANDLE_MAXSIZE];
    void *listener = NULL, *other = NULL, *request = comm, *memory = comm;
    void *foreign[2] = {"another plugin's handle, of over twenty bytes", handle};
    float one = 1, zero = 0;
    int supported = 1;
    *warnings = 0;
    ASSERT(coll->listen(context, 1, handle, &listener) == ncclInvalidArgument && !listener);
    ASSERT(warned("device 1"));
    ASSERT(coll->listen(context, 0, handle, &listener) == ncclSuccess);
    ASSERT(coll->connect(foreign, 2, 0, listener, &other) == ncclInvalidArgument && !other);
    ASSERT(warned("another plugin"));
    ASSERT(coll->connect(foreign, 2, 2, listener, &other) == ncclInvalidArgument);
    ASSERT(warned("rank 2 of 2"));
    ASSERT(coll->connect(foreign, 2, 0, NULL, &other) == ncclInvalidArgument);
    static const ncclDataType_t ALL[] = {ncclInt32, ncclFloat16, ncclFloat32, ncclBfloat16};
    for (int op = ncclSum; op <= ncclMin; op++) {
        for (int t = 0; t < 4; t++) {
            ASSERT(coll->reduceSupport(ALL[t], (ncclRedOp_t)op, &supported) == ncclSuccess);
            ASSERT(supported == (op == ncclSum));
        }
    }
    ASSERT(coll->reduceSupport(ncclFloat64, ncclSum, &supported) == ncclSuccess && !supported);
    *warnings = 0;
    ASSERT(coll->iallreduce(comm, &one, &zero, 1, ncclFloat32, ncclMax, NULL, NULL, &request)
           == ncclInvalidArgument && !request);
    ASSERT(warned("operation 2"));
    ASSERT(coll->iallreduce(comm, &one, &zero, 1, ncclFloat64, ncclSum, NULL, NULL, &request)
           == ncclInvalidArgument);
    ASSERT(coll->iallreduce(comm, NULL, &zero, 1, ncclFloat32, ncclSum, NULL, NULL, &request)
           == ncclInvalidArgument);
    ASSERT(coll->regMr(comm, &one, 4, NCCL_PTR_CUDA, &memory) == ncclInternalError && !memory);
    ASSERT(warned("only host memory"));
    ASSERT(coll->regMr(comm, &one, 4, NCCL_PTR_HOST, &memory) == ncclSuccess && memory);
    ASSERT(coll->deregMr(comm, memory) == ncclSuccess);
    /* NCCL's functions for older tables are never NULL. */
    ASSERT(getenv("NETSUM_TEST_NCCL") || (!coll->iallgather && !coll->ireducescatter));
}

/* The last rank is killed before it begins the last sums. The others must not hang. */
static void dies(void *comm) {
    void *requests[FLIGHT];
    int own = rank == ranks - 1 ? FLIGHT / 2 : FLIGHT;
    for (int i = 0; i < own; i++) ASSERT((requests[i] = begin(comm, i, 0)));
    together();
    ncclResult_t result = ncclSuccess;
    for (int done = 0; result == ncclSuccess;) {
        result = coll_test(requests[FLIGHT - 1], &done, NULL);
        ASSERT(!done);
    }
    ASSERT(result == ncclRemoteError);
    ASSERT(coll->closeColl(comm) == ncclSuccess);
    printf("error %d: %s\n", result, warnings);
}

/* Two communicators at once, whose requests begin in different orders at different ranks. */
static void two(void) {
    void *all = connected(0, 0), *half = connected(1, 0);
    void *requests[FLIGHT];
    for (int i = 0; i < FLIGHT; i += 2) {
        requests[i + rank % 2] = begin(rank % 2 ? half : all, i + rank % 2, 0);
        requests[i + 1 - rank % 2] = begin(rank % 2 ? all : half, i + 1 - rank % 2, 0);
    }
    for (int i = FLIGHT - 1; i >= 0; i--) {
        int members = i % 2 ? ranks / 2 : ranks;
        finish(requests[i]), check(i, 0, i % 2 ? rank / members * members : 0, members);
    }
    ASSERT(coll->closeColl(half) == ncclSuccess);
    sums(all);
    ASSERT(coll->closeColl(all) == ncclSuccess);
}

/* The last rank closes what it has not begun. */
static void closes(void *comm) {
    if (rank != ranks - 1) ASSERT(begin(comm, 0, 0) && begin(comm, 1, 0));
    together();
}

/* Messages to the next rank, several in flight, the first of them larger than a socket's buffer. */
static void sends(void) {
    enum { LARGE = 1 << 23 };
    static char out[LARGE], in[LARGE + 1];
    unsigned char mine[NCCL_NET_HANDLE_MAXSIZE] = {0};
    void *listener = NULL, *to = NULL, *from = NULL, *memory, *parts[1];
    ASSERT(net->listen(net_context, 0, mine, &listener) == ncclSuccess);
    /* A connection without the secret comes first, and is closed. The address is behind a
     * magic, the secret and its own length: sockets.c. Others stay silent. */
    int foreign = socket(AF_INET, SOCK_STREAM, 0), silent[20];
    struct sockaddr_in address;
    memcpy(&address, mine + 20, sizeof address);
    ASSERT(connect(foreign, (struct sockaddr *)&address, sizeof address) == 0);
    ASSERT(send(foreign, "foreign!", 8, 0) == 8);
    for (int i = 0; i < 20; i++) {
        silent[i] = socket(AF_INET, SOCK_STREAM, 0);
        ASSERT(connect(silent[i], (struct sockaddr *)&address, sizeof address) == 0);
        ASSERT(i % 2 || send(silent[i], "f", 1, 0) == 1);
    }
    exchange(mine, sizeof mine, handles);
    unsigned char next[NCCL_NET_HANDLE_MAXSIZE];
    memcpy(next, handles[(rank + 1) % ranks], sizeof next);
    while (!to || !from) {
        if (!to) ASSERT(net->connect(net_context, 0, next, &to, NULL) == ncclSuccess);
        if (!from) ASSERT(net->accept(listener, &from, NULL) == ncclSuccess);
    }
    ASSERT(recv(foreign, mine, 1, 0) <= 0 && close(foreign) == 0);
    for (int i = 0; i < 20; i++) ASSERT(close(silent[i]) == 0);
    /* Another plugin's handle. */
    memset(mine, 1, sizeof mine);
    void *none;
    ASSERT(net->connect(net_context, 0, mine, &none, NULL) == ncclInvalidArgument);
    ASSERT(net->closeListen(listener) == ncclSuccess);
    ASSERT(net->regMr(to, out, LARGE, NCCL_PTR_HOST, &memory) == ncclSuccess);
    for (int i = 0; i < LARGE; i++) out[i] = (char)(i / 1000 + rank);
    static const size_t SIZES[] = {LARGE, 0, 1, 70000};
    void *sent[4] = {0}, *received[4] = {0};
    static char small[4][70001];
    for (int i = 0; i < 4; i++) {
        /* The room may be larger than what comes. */
        size_t room = SIZES[i] + 1;
        int tag = 0;
        parts[0] = i ? small[i] : in;
        ASSERT(net->isend(to, out, SIZES[i], 0, memory, NULL, &sent[i]) == ncclSuccess && sent[i]);
        ASSERT(net->irecv(from, 1, parts, &room, &tag, &memory, NULL, &received[i]) == ncclSuccess);
        ASSERT(received[i]);
    }
    for (int left = 8; left; sched_yield()) {
        for (int i = 3; i >= 0; i--) {
            int done = 0, size = -1;
            if (sent[i]) ASSERT(net->test(sent[i], &done, &size) == ncclSuccess);
            if (done) ASSERT(size == (int)SIZES[i]), sent[i] = NULL, left--;
            done = 0;
            if (received[i]) ASSERT(net->test(received[i], &done, &size) == ncclSuccess);
            if (done) ASSERT(size == (int)SIZES[i]), received[i] = NULL, left--;
        }
    }
    int other = (rank + ranks - 1) % ranks;
    for (int i = 0; i < LARGE; i++) ASSERT(in[i] == (char)(i / 1000 + other));
    for (int i = 0; i < 70000; i++) ASSERT(small[3][i] == (char)(i / 1000 + other));
    /* A receive that the peer never sends for is an error once it has closed. */
    size_t room = 1;
    int tag = 0, done = 0;
    void *request = NULL;
    ASSERT(net->irecv(from, 1, parts, &room, &tag, &memory, NULL, &request) == ncclSuccess);
    ASSERT(net->test(request, &done, NULL) == ncclSuccess && !done);
    together();
    ASSERT(net->closeSend(to) == ncclSuccess);
    ncclResult_t result = ncclSuccess;
    while (result == ncclSuccess) result = net->test(request, &done, NULL), ASSERT(!done);
    ASSERT(result == ncclRemoteError && warned("closed"));
    ASSERT(net->closeRecv(from) == ncclSuccess);
}

int main(int count, char **words) {
    ASSERT(count == 6 || count == 9);
    alarm(120);
    const char *what = words[3];
    version = atoi(words[2]), rank = atoi(words[4]), ranks = atoi(words[5]);
    if (count == 9) load_as_nccl("netsum", words + 6);
    else load(words[1]);
    ASSERT(net && coll && strcmp(net->name, "netsum") == 0 && strcmp(coll->name, "netsum") == 0);
    int config[1] = {-1}, devices = 0;
    ncclResult_t result = net->init(&net_context, 1, config, logger, NULL);
    if (strcmp(what, "disabled") == 0) {
        ASSERT(result == ncclSystemError && warned("NETSUM_CONTROLLER"));
        printf("disabled\n");
        return 0;
    }
    ASSERT(result == ncclSuccess && coll->init(&context, 1, logger) == ncclSuccess);
    ASSERT(net->devices(&devices) == ncclSuccess && devices == 1);
    ASSERT(coll->devices(&devices) == ncclSuccess && devices == 1);
    properties_v12 device;
    ASSERT(coll->getProperties(0, &device) == ncclSuccess);
    ASSERT(device.ptrSupport == NCCL_PTR_HOST && device.speed > 0 && device.maxCollBytes > 0);
    ASSERT(device.maxRecvs == 1 && device.maxComms > 0 && *device.name);
    if (strcmp(what, "two") == 0) two();
    else if (strcmp(what, "sends") == 0) sends();
    else if (strcmp(what, "refused") == 0) connected(0, 1), ASSERT(*warnings);
    else {
        void *comm = connected(0, 0);
        sums(comm);
        together();
        if (strcmp(what, "dies") == 0) return dies(comm), 0;
        if (strcmp(what, "all") == 0) types(comm), busy(comm), wrong(comm), sums(comm), together();
        if (strcmp(what, "closes") == 0) closes(comm);
        ASSERT(coll->closeColl(comm) == ncclSuccess);
    }
    ASSERT(coll->finalize(context) == ncclSuccess && net->finalize(net_context) == ncclSuccess);
    printf("done\n");
    return 0;
}
