/* Tests the functions' arguments, errors, threads and forks, with two ranks. */
#include <netsum.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ASSERT(x)                                                                      \
    do {                                                                               \
        if (!(x)) {                                                                    \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #x, netsum_error_text());   \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)
#define FAILS(call, status, word)                                                      \
    do {                                                                               \
        ASSERT((call) == (status));                                                    \
        ASSERT(strstr(netsum_error_text(), word));                                     \
    } while (0)

static netsum_comm *comm;

static void *other_thread(void *unused) {
    (void)unused;
    /* Errors are each thread's own. */
    ASSERT(strlen(netsum_error_text()) == 0);
    ASSERT(netsum_error_rank() == -1);
    for (int i = 0; i < 50; i++) {
        int32_t one = 1;
        ASSERT(netsum_all_reduce(comm, &one, 1, NETSUM_INT32, NETSUM_SUM, NULL) == NETSUM_OK);
        ASSERT(one == 2);
    }
    return NULL;
}

/* Runs when the library's own data of the thread are gone. */
static void at_thread_end(void *config) {
    ASSERT(netsum_config_set(config, "colour", "red") == NETSUM_ERROR_CONFIG);
    ASSERT(strlen(netsum_error_text()) == 0);
    ASSERT(netsum_error_rank() == -1);
}

enum { PLACES = 8 };

static pthread_barrier_t together;

static void *begins(void *unused) {
    (void)unused;
    pthread_barrier_wait(&together);
    ASSERT(netsum_barrier(comm, NULL) == NETSUM_OK);
    return NULL;
}

static pthread_key_t key;

static void *ends(void *config) {
    FAILS(netsum_config_set(config, "colour", "red"), NETSUM_ERROR_CONFIG, "no setting");
    ASSERT(pthread_setspecific(key, config) == 0);
    return NULL;
}

/* Every byte is where the book's table says (reference/protocol.md). */
static void header(void) {
    static const uint8_t expected[NETSUM_JOB_HEADER_SIZE] = {
        'n', 's', 'u', 'm', 1, 1, 0, 0,
        0x05, 0xe6, 0x93, 0xc3, 0x0a, 0xe6, 0x2a, 0xc8, 0x08, 0xee, 0xf2, 0xb3, 0x5c, 0x03, 0x0d, 0xc1,
        2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0, 7, 0, 0, 0,
    };
    netsum_message message = {
        .token = "05e693c30ae62ac808eef2b35c030dc1", .ring = 2, .rank = 3, .ranks = 4, .number = 5,
        .packets = 6, .packets_before = (1 << 24) + 7,
    };
    uint8_t written[NETSUM_JOB_HEADER_SIZE + 1] = {0};
    ASSERT(netsum_job_header(&message, written) == NETSUM_OK);
    ASSERT(memcmp(written, expected, sizeof expected) == 0);
    FAILS(netsum_job_header(NULL, written), NETSUM_ERROR_ARGUMENT, "message is NULL");
    FAILS(netsum_job_header(&message, NULL), NETSUM_ERROR_ARGUMENT, "header is NULL");
    static const char *const wrong[] = {
        "", "+5e693c30ae62ac808eef2b35c030dc1", "05e693c30ae62ac808eef2b35c030dc12", "secret",
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        message.token = wrong[i];
        FAILS(netsum_job_header(&message, written), NETSUM_ERROR_ARGUMENT, "32 hexadecimal digits");
    }
    message.token = NULL;
    FAILS(netsum_job_header(&message, written), NETSUM_ERROR_ARGUMENT, "token is NULL");
}

/* Reduces `mine + rank`, and compares with what two ranks make of it. */
#define REDUCES(type, dtype, op, mine, expected)                                       \
    do {                                                                               \
        type value[3] = {(type)((mine) + (type)rank), 0, (type)((mine) + (type)rank)}; \
        ASSERT(netsum_all_reduce(comm, value, 3, dtype, op, NULL) == NETSUM_OK);       \
        ASSERT(value[0] == (type)(expected) && value[2] == (type)(expected));          \
    } while (0)

static void operators(uint32_t rank) {
    REDUCES(int8_t, NETSUM_INT8, NETSUM_SUM, 100, 201);
    REDUCES(uint8_t, NETSUM_UINT8, NETSUM_MAX, 254, 255);
    REDUCES(int8_t, NETSUM_INT8, NETSUM_MIN, -1, -1);
    REDUCES(int16_t, NETSUM_INT16, NETSUM_SUM, -7, -13);
    REDUCES(uint16_t, NETSUM_UINT16, NETSUM_BXOR, 6, 1);
    REDUCES(int32_t, NETSUM_INT32, NETSUM_MIN, -1, -1);
    REDUCES(uint32_t, NETSUM_UINT32, NETSUM_MAX, UINT32_MAX - 1, UINT32_MAX);
    REDUCES(int64_t, NETSUM_INT64, NETSUM_SUM, -(INT64_C(1) << 40), 1 - (INT64_C(1) << 41));
    REDUCES(uint64_t, NETSUM_UINT64, NETSUM_PRODUCT, UINT64_C(1) << 32, UINT64_C(1) << 32);
    REDUCES(uint64_t, NETSUM_UINT64, NETSUM_BOR, UINT64_C(1) << 63, (UINT64_C(1) << 63) + 1);
    REDUCES(int32_t, NETSUM_INT32, NETSUM_BAND, 6, 6);
    REDUCES(float, NETSUM_FLOAT32, NETSUM_PRODUCT, 1.5f, 3.75f);
    REDUCES(double, NETSUM_FLOAT64, NETSUM_SUM, 0.1, 0.1 + (0.1 + 1));
    REDUCES(double, NETSUM_FLOAT64, NETSUM_AVERAGE, 2.0, 2.5);
    /* Any byte but 0 is true. */
    uint8_t flags[3] = {rank == 0 ? 4 : 0, 0, 3};
    ASSERT(netsum_all_reduce(comm, flags, 3, NETSUM_BOOL, NETSUM_SUM, NULL) == NETSUM_OK);
    ASSERT(flags[0] == 1 && flags[1] == 0 && flags[2] == 1);
    bool both[2] = {true, rank == 1}, part;
    ASSERT(netsum_reduce_scatter(comm, &part, both, 1, NETSUM_BOOL, NETSUM_BAND, NULL)
           == NETSUM_OK);
    ASSERT(part == (rank == 0));
}

int main(void) {
    header();
    netsum_config *config;
    ASSERT(netsum_config_new(&config) == NETSUM_OK);
    FAILS(netsum_config_set(config, "colour", "red"), NETSUM_ERROR_CONFIG, "no setting \"colour\"");
    FAILS(netsum_config_set(config, NULL, "red"), NETSUM_ERROR_ARGUMENT, "name is NULL");
    pthread_t ending;
    ASSERT(pthread_key_create(&key, at_thread_end) == 0);
    ASSERT(pthread_create(&ending, NULL, ends, config) == 0 && pthread_join(ending, NULL) == 0);
    ASSERT(netsum_config_set(config, "transport", "smoke") == NETSUM_OK);
    comm = (netsum_comm *)config;
    FAILS(netsum_init(config, &comm), NETSUM_ERROR_CONFIG, "auto, udp, xdp or verbs");
    ASSERT(comm == NULL);
    FAILS(netsum_init(config, NULL), NETSUM_ERROR_ARGUMENT, "comm is NULL");
    ASSERT(netsum_config_set(config, "transport", "udp") == NETSUM_OK);
    ASSERT(netsum_config_set(config, "timeout", "2") == NETSUM_OK);
    ASSERT(netsum_init(config, &comm) == NETSUM_OK);
    netsum_config_free(config);
    netsum_config_free(NULL);
    uint32_t rank = netsum_rank(comm), ranks = netsum_ranks(comm);
    ASSERT(ranks == 2);

    float x[4] = {1, 2, 3, 4};
    FAILS(netsum_all_reduce(comm, x, 4, 77, NETSUM_SUM, NULL), NETSUM_ERROR_ARGUMENT, "dtype 77");
    FAILS(netsum_all_reduce(comm, x, 4, NETSUM_FLOAT32, 9, NULL), NETSUM_ERROR_ARGUMENT, "op 9");
    FAILS(netsum_all_reduce(comm, NULL, 4, NETSUM_FLOAT32, NETSUM_SUM, NULL),
          NETSUM_ERROR_ARGUMENT, "data is NULL");
    FAILS(netsum_all_reduce(comm, (char *)x + 1, 3, NETSUM_FLOAT32, NETSUM_SUM, NULL),
          NETSUM_ERROR_ARGUMENT, "aligned");
    FAILS(netsum_all_reduce(comm, x, SIZE_MAX, NETSUM_FLOAT32, NETSUM_SUM, NULL),
          NETSUM_ERROR_ARGUMENT, "more than memory");
    FAILS(netsum_all_reduce(comm, x, 4, NETSUM_INT32, NETSUM_AVERAGE, NULL),
          NETSUM_ERROR_ARGUMENT, "avg of i32: only floats have an average");
    FAILS(netsum_all_reduce(comm, x, 4, NETSUM_FLOAT32, NETSUM_BAND, NULL),
          NETSUM_ERROR_ARGUMENT, "band of f32");
    FAILS(netsum_reduce(comm, x, 4, NETSUM_FLOAT32, NETSUM_SUM, 2, NULL),
          NETSUM_ERROR_ARGUMENT, "root 2");
    netsum_work *none = (netsum_work *)x;
    FAILS(netsum_reduce(comm, x, 4, NETSUM_FLOAT32, NETSUM_SUM, 2, &none),
          NETSUM_ERROR_ARGUMENT, "root 2");
    ASSERT(none == NULL);
    none = (netsum_work *)x;
    FAILS(netsum_all_reduce(comm, x, 4, 77, NETSUM_SUM, &none), NETSUM_ERROR_ARGUMENT, "dtype 77");
    ASSERT(none == NULL);
    FAILS(netsum_all_reduce(NULL, x, 4, NETSUM_FLOAT32, NETSUM_SUM, NULL),
          NETSUM_ERROR_ARGUMENT, "comm is NULL");
    FAILS(netsum_wait(NULL, NULL), NETSUM_ERROR_ARGUMENT, "work is NULL");
    ASSERT(netsum_all_reduce(comm, NULL, 0, NETSUM_FLOAT32, NETSUM_SUM, NULL) == NETSUM_OK);

    ASSERT(netsum_all_reduce(comm, x, 4, NETSUM_FLOAT32, NETSUM_AVERAGE, NULL) == NETSUM_OK);
    ASSERT(x[0] == 1 && x[3] == 4);
    static float infinite[5000];
    infinite[7] = 1.0f / 0.0f;
    FAILS(netsum_all_reduce(comm, infinite, 5000, NETSUM_FLOAT32, NETSUM_SUM, NULL),
          NETSUM_ERROR_NON_FINITE, "infinity");
    infinite[7] = 1.0f / 0.0f;
    infinite[8] = 1;
    ASSERT(netsum_all_reduce(comm, infinite + 7, 2, NETSUM_FLOAT32, NETSUM_SUM, NULL) == NETSUM_OK);
    ASSERT(infinite[7] == 1.0f / 0.0f && infinite[8] == 2);
    int32_t mine = 10 + (int32_t)rank;
    ASSERT(netsum_reduce(comm, &mine, 1, NETSUM_INT32, NETSUM_SUM, 1, NULL) == NETSUM_OK);
    ASSERT(mine == (rank == 1 ? 21 : 10));
    operators(rank);
    char name[6] = "rank0";
    name[4] += (char)rank;
    char names[12], all[12];
    ASSERT(netsum_all_gather(comm, names, name, 6, NULL) == NETSUM_OK);
    ASSERT(memcmp(names, "rank0\0rank1", 12) == 0);
    ASSERT(netsum_broadcast(comm, name, 6, 1, NULL) == NETSUM_OK);
    ASSERT(strcmp(name, "rank1") == 0);
    char parts[12] = "to 0.\0to 1.";
    parts[4] = parts[10] = (char)('a' + rank);
    ASSERT(netsum_all_to_all(comm, all, parts, 6, NULL) == NETSUM_OK);
    ASSERT(memcmp(all, rank == 0 ? "to 0a\0to 0b" : "to 1a\0to 1b", 12) == 0);
    int32_t two[2] = {1, 2}, one;
    ASSERT(netsum_reduce_scatter(comm, &one, two, 1, NETSUM_INT32, NETSUM_SUM, NULL) == NETSUM_OK);
    ASSERT(one == (rank == 0 ? 2 : 4));

    /* In place is allowed only for exactly this rank's part of the longer array. */
    memset(names, 0, 12);
    memcpy(names + 6 * rank, rank == 0 ? "here0" : "here1", 6);
    ASSERT(netsum_all_gather(comm, names, names + 6 * rank, 6, NULL) == NETSUM_OK);
    ASSERT(memcmp(names, "here0\0here1", 12) == 0);
    FAILS(netsum_all_gather(comm, names, names + 6 * (1 - rank), 6, NULL),
          NETSUM_ERROR_ARGUMENT, "share memory");
    FAILS(netsum_all_to_all(comm, names, names, 6, NULL), NETSUM_ERROR_ARGUMENT, "share memory");
    FAILS(netsum_reduce_scatter(comm, &two[1 - rank], two, 1, NETSUM_INT32, NETSUM_SUM, NULL), NETSUM_ERROR_ARGUMENT, "share memory");
    ASSERT(netsum_reduce_scatter(comm, &two[rank], two, 1, NETSUM_INT32, NETSUM_SUM, NULL)
           == NETSUM_OK);
    ASSERT(two[rank] == (rank == 0 ? 2 : 4) && two[1 - rank] == (rank == 0 ? 2 : 1));

    /* Groups are of a job on a box. */
    netsum_comm *part = comm;
    FAILS(netsum_split(comm, 0, 0, NULL), NETSUM_ERROR_ARGUMENT, "part");
    FAILS(netsum_split(comm, 0, 0, &part), NETSUM_ERROR_CONFIG, "groups need a box");
    ASSERT(part == NULL);

    /* Threads: as many calls at both ranks, all alike. */
    pthread_t threads[3];
    for (int t = 0; t < 3; t++) ASSERT(pthread_create(&threads[t], NULL, other_thread, NULL) == 0);
    for (int t = 0; t < 3; t++) ASSERT(pthread_join(threads[t], NULL) == 0);

    /* The other process is not a member of the job, and its end does not end the job. */
    pid_t child = fork();
    if (child == 0) {
        FAILS(netsum_barrier(comm, NULL), NETSUM_ERROR_FORKED, "forked");
        netsum_finalize(comm);
        _exit(0);
    }
    int status;
    ASSERT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    ASSERT(netsum_barrier(comm, NULL) == NETSUM_OK);

    /* For ever is not at once. */
    netsum_work *late;
    bool there = false;
    if (rank == 1) sleep(1);
    ASSERT(netsum_barrier(comm, &late) == NETSUM_OK);
    ASSERT(netsum_wait_for(late, INFINITY, &there) == NETSUM_OK && there);
    ASSERT(netsum_wait_for(late, 1e300, &there) == NETSUM_OK && there);
    ASSERT(netsum_wait_for(late, NAN, &there) == NETSUM_OK && there);
    ASSERT(netsum_wait(late, NULL) == NETSUM_OK);

    /* Many threads start an operation at once where there are few places left, and the other rank
     * is late: other functions of the library do not wait. */
    if (rank == 1) {
        sleep(4);
        for (int i = 0; i < 61 + PLACES; i++) ASSERT(netsum_barrier(comm, NULL) == NETSUM_OK);
    } else {
        netsum_work *works[61];
        for (int i = 0; i < 61; i++) ASSERT(netsum_barrier(comm, &works[i]) == NETSUM_OK);
        pthread_t racing[PLACES];
        ASSERT(pthread_barrier_init(&together, NULL, PLACES) == 0);
        for (int t = 0; t < PLACES; t++) ASSERT(pthread_create(&racing[t], NULL, begins, NULL) == 0);
        nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
        time_t before = time(NULL);
        netsum_get_mode(comm);
        ASSERT(time(NULL) - before <= 1);
        for (int t = 0; t < PLACES; t++) ASSERT(pthread_join(racing[t], NULL) == 0);
        for (int i = 0; i < 61; i++) ASSERT(netsum_wait(works[i], NULL) == NETSUM_OK);
    }

    /* The other rank does not make the call: the handle returns an error, and the memory is free. */
    netsum_work *work;
    bool done = true;
    if (rank == 0) {
        ASSERT(netsum_all_reduce(comm, &one, 1, NETSUM_INT32, NETSUM_SUM, &work) == NETSUM_OK);
        ASSERT(netsum_test(work, &done) == NETSUM_OK && !done);
        FAILS(netsum_all_reduce(comm, &one, 1, NETSUM_INT32, NETSUM_SUM, NULL),
              NETSUM_ERROR_ARGUMENT, "operation 1 of 1 in flight");
        ASSERT(netsum_wait_for(work, 0.05, &done) == NETSUM_OK && !done);
        netsum_finalize(comm);
        netsum_report report;
        FAILS(netsum_wait(work, &report), NETSUM_ERROR_CLOSED, "closed");
    } else {
        sleep(6);
        FAILS(netsum_barrier(comm, NULL), NETSUM_ERROR_RANK_LEFT, "rank 0");
        ASSERT(netsum_error_rank() == 0);
        netsum_finalize(comm);
    }
    return 0;
}
