// Compares each call that netsum may take with MPI's own, on several communicators. Run with
// NETSUM_MPI_MIN_BYTES=0. Rank 0 prints how many of its calls netsum must have taken.
//
//     calls         all calls, of four ranks, of which only 0 and 1 share a host
//     calls die F   the last rank kills itself in the middle of an operation; each other one writes
//                   to a file, F and its number: launchers lose output when a rank dies
//     calls plain   sums on MPI_COMM_WORLD, with or without netsum

#include <limits.h>
#include <math.h>
#include <mpi.h>
#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Open MPI's extension pcollreq has persistent forms with other names.
#if defined OPEN_MPI && OMPI_MAJOR_VERSION < 5
#define INIT(NAME) MPIX_##NAME##_init
#else
#define INIT(NAME) MPI_##NAME##_init
#endif

enum kind { ALLREDUCE, REDUCE, BCAST, REDUCE_SCATTER_BLOCK, ALLGATHER, BARRIER, KINDS };
static const char *const NAMES[KINDS] = {"Allreduce",            "Reduce",    "Bcast",
                                         "Reduce_scatter_block", "Allgather", "Barrier"};

static int expected[KINDS], world_rank;
static MPI_Comm comm;
static int rank, ranks;
#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "rank %d, line %d: %s: ", world_rank, __LINE__, #condition);           \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
            MPI_Abort(MPI_COMM_WORLD, 1);                                                          \
        }                                                                                          \
    } while (0)

static void use(MPI_Comm other) {
    comm = other;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
}

// Each way of waiting in turn, with and without a status. Returns MPI's error code.
static int finish(MPI_Request *request) {
    static int turn;
    int flag = 0, index, some = 0, code = 0, way = turn++ % 16;
    MPI_Status own = {.MPI_ERROR = MPI_SUCCESS};
    MPI_Status *status = way < 8 ? &own : MPI_STATUS_IGNORE;
    MPI_Status *statuses = way < 8 ? &own : MPI_STATUSES_IGNORE;
    switch (way % 8) {
    case 0: code = MPI_Wait(request, status); break;
    case 1: code = MPI_Waitall(1, request, statuses); break;
    case 2: code = MPI_Waitany(1, request, &index, status); break;
    case 3: code = MPI_Waitsome(1, request, &some, &index, statuses); break;
    case 4: while (!flag) code = MPI_Test(request, &flag, status); break;
    case 5: while (!flag) code = MPI_Testall(1, request, &flag, statuses); break;
    case 6: while (!flag) code = MPI_Testany(1, request, &index, &flag, status); break;
    default:
        while (!flag) code = MPI_Request_get_status(*request, &flag, status);
        while (!some) code = MPI_Testsome(1, request, &some, &index, statuses);
    }
    CHECK(*request == MPI_REQUEST_NULL, "turn %d", turn);
    return code;
}

struct type {
    MPI_Datatype type;
    size_t size;
    int covered;
};

static void fill(const struct type *type, char *data, size_t count, int seed) {
    for (size_t i = 0; i < count; i++) {
        int value = (int)((i * 7 + (size_t)seed * 13) % 1000) - 300;
        if (type->type == MPI_FLOAT) ((float *)data)[i] = (float)value / 8;
        else if (type->type == MPI_DOUBLE) ((double *)data)[i] = value / 8.0;
        else if (type->size == 8) ((long long *)data)[i] = value;
        else memcpy(data + 4 * i, &value, 4);
    }
}

static void same(const struct type *type, const char *a, const char *b, size_t count, int line) {
    for (size_t i = 0; i < count; i++) {
        int is_same = !memcmp(a + i * type->size, b + i * type->size, type->size);
        float x = 0, y = 0;
        if (type->type == MPI_FLOAT) {
            x = ((const float *)a)[i], y = ((const float *)b)[i];
            is_same |= fabsf(x - y) <= 1e-4f || (isnan(x) && isnan(y));
        }
        CHECK(is_same, "called in line %d: element %zu of %zu: %g, not %g", line, i, count, x, y);
    }
}

static char *space(size_t bytes) {
    char *memory = malloc(bytes + 64);
    CHECK(memory, "%zu", bytes);
    return memset(memory, 0x55, bytes + 64);
}

static int takes(int covered, enum kind kind) {
    int taken = covered && ranks > 1;
    expected[kind] += taken;
    return taken;
}

static void reductions(const struct type *type, int count, MPI_Op op) {
    size_t bytes = type->size * (size_t)count;
    char *in = space(bytes * (size_t)ranks), *out = space(bytes * (size_t)ranks);
    char *right = space(bytes);
    int covered = type->covered && op == MPI_SUM;
    // MPICH 4.0.2 itself crashes in some long reductions in place at other roots.
    int root = covered ? ranks - 1 : 0;
    MPI_Request request;
    for (int later = 0; later < 2; later++)
        for (int in_place = 0; in_place < 2; in_place++) {
            int taken = covered && !(later && type->type == MPI_FLOAT);
            fill(type, in, (size_t)count * (size_t)ranks, rank);
            memcpy(out, in, bytes);
            PMPI_Allreduce(in, right, count, type->type, op, comm);
            const void *from = in_place ? MPI_IN_PLACE : in;
            if (later) {
                MPI_Iallreduce(from, out, count, type->type, op, comm, &request);
                finish(&request);
            } else {
                MPI_Allreduce(from, out, count, type->type, op, comm);
            }
            same(type, out, right, (size_t)count, __LINE__);
            takes(taken, ALLREDUCE);

            memcpy(out, in, bytes);
            from = in_place && rank == root ? MPI_IN_PLACE : in;
            if (later) {
                MPI_Ireduce(from, out, count, type->type, op, root, comm, &request);
                finish(&request);
            } else {
                MPI_Reduce(from, out, count, type->type, op, root, comm);
            }
            if (rank == root) same(type, out, right, (size_t)count, __LINE__);
            takes(taken, REDUCE);

            memcpy(out, in, bytes * (size_t)ranks);
            PMPI_Reduce_scatter_block(in, right, count, type->type, op, comm);
            from = in_place ? MPI_IN_PLACE : in;
            if (later) {
                MPI_Ireduce_scatter_block(from, out, count, type->type, op, comm, &request);
                finish(&request);
            } else {
                MPI_Reduce_scatter_block(from, out, count, type->type, op, comm);
            }
            same(type, out, right, (size_t)count, __LINE__);
            takes(taken, REDUCE_SCATTER_BLOCK);
        }
    free(in), free(out), free(right);
}

// Rank 0 has every second element of a vector where the others have a plain one.
static void moves(int count) {
    MPI_Datatype spread;
    MPI_Type_vector(count, 1, 2, MPI_INT, &spread);
    MPI_Type_commit(&spread);
    int stride = rank == 0 ? 2 : 1;
    MPI_Datatype type = rank == 0 ? spread : MPI_INT;
    int number = rank == 0 ? 1 : count;
    size_t all = (size_t)count * 2 * (size_t)(ranks + 1);
    int *own = (int *)space(all * 4), *data = (int *)space(all * 4);
    MPI_Request request;
    for (int later = 0; later < 2; later++) {
        for (int root = 0; root < 2 && root < ranks; root++) {
            for (int i = 0; i < count; i++) data[i * stride] = rank * 1000 + i;
            if (later) {
                // A type may be freed while it is in use.
                MPI_Datatype again;
                MPI_Type_dup(type, &again);
                MPI_Ibcast(data, number, again, root, comm, &request);
                MPI_Type_free(&again);
                finish(&request);
            } else {
                MPI_Bcast(data, number, type, root, comm);
            }
            for (int i = 0; i < count; i++)
                CHECK(data[i * stride] == root * 1000 + i, "%d: %d", i, data[i * stride]);
            takes(1, BCAST);
        }
        for (int in_place = 0; in_place < 2; in_place++) {
            // A vector's extent ends with its last element, so blocks of rank 0 are one shorter.
            size_t block = rank == 0 ? (size_t)count * 2 - 1 : (size_t)count;
            memset(data, 0x55, all * 4);
            for (int i = 0; i < count; i++) {
                own[i * stride] = rank * 1000 + i;
                if (in_place) data[block * (size_t)rank + (size_t)(i * stride)] = rank * 1000 + i;
            }
            const void *from = in_place ? MPI_IN_PLACE : own;
            if (later) {
                MPI_Iallgather(from, number, type, data, number, type, comm, &request);
                finish(&request);
            } else {
                MPI_Allgather(from, number, type, data, number, type, comm);
            }
            for (int other = 0; other < ranks; other++)
                for (int i = 0; i < count; i++) {
                    int value = data[block * (size_t)other + (size_t)(i * stride)];
                    CHECK(value == other * 1000 + i, "%d of %d: %d", i, other, value);
                }
            takes(1, ALLGATHER);
        }
        if (later) {
            MPI_Ibarrier(comm, &request);
            finish(&request);
        } else {
            MPI_Barrier(comm);
        }
        takes(1, BARRIER);
    }
    MPI_Type_free(&spread);
    free(own), free(data);
}

static const struct type TYPES[] = {
    {MPI_INT, 4, 1}, {MPI_UNSIGNED, 4, 1},   {MPI_FLOAT, 4, 1},
    {MPI_DOUBLE, 8, 0}, {MPI_LONG_LONG, 8, 0},
};

static void everything(MPI_Comm other) {
    use(other);
    for (size_t t = 0; t < sizeof TYPES / sizeof *TYPES; t++)
        reductions(&TYPES[t], TYPES[t].covered ? 5000 : 10, MPI_SUM);
    moves(1);
    moves(5000);
    if (other == MPI_COMM_WORLD) reductions(&TYPES[2], 70001, MPI_SUM);
    reductions(&TYPES[0], 10, MPI_MAX);
    int none = 7;
    MPI_Allreduce(MPI_IN_PLACE, &none, 0, MPI_INT, MPI_SUM, comm);
    CHECK(none == 7, "%d", none);
}

// Many at once, in another order of waiting, from one buffer; and one that is not aligned.
static void many(void) {
    enum { CALLS = 100, COUNT = 3000 };
    static int in[COUNT], out[CALLS][COUNT];
    static char odd[COUNT * 4 + 1], right[COUNT * 4];
    MPI_Request requests[CALLS];
    int word;
    use(MPI_COMM_WORLD);
    fill(&TYPES[0], (char *)in, COUNT, rank);
    for (int i = 0; i < CALLS; i++) {
        MPI_Ireduce(in, out[i], COUNT, MPI_INT, MPI_SUM, i % ranks, comm, &requests[i]);
        takes(1, REDUCE);
    }
    PMPI_Allreduce(in, right, COUNT, MPI_INT, MPI_SUM, comm);
    // Operations start and complete at ranks that wait within MPI's own functions.
    if (rank > 0) MPI_Recv(&word, 1, MPI_INT, 0, 0, comm, MPI_STATUS_IGNORE);
    for (int i = CALLS / 2; i < CALLS; i++) finish(&requests[i]);
    MPI_Waitall(CALLS / 2, requests, MPI_STATUSES_IGNORE);
    for (int to = 1; to < ranks && rank == 0; to++) MPI_Send(&to, 1, MPI_INT, to, 0, comm);
    for (int i = 0; i < CALLS; i++)
        if (i % ranks == rank) same(&TYPES[0], (char *)out[i], right, COUNT, __LINE__);
    memcpy(odd + 1, in, COUNT * 4);
    MPI_Allreduce(MPI_IN_PLACE, odd + 1, COUNT, MPI_INT, MPI_SUM, comm);
    same(&TYPES[0], odd + 1, right, COUNT, __LINE__);
    takes(1, ALLREDUCE);
    MPI_Ibarrier(comm, &requests[0]);
    MPI_Request_free(&requests[0]);
    takes(1, BARRIER);
}

// Persistent requests: started again and again, by each rank in another order, beside others.
static void persistent(void) {
    enum { COUNT = 3000, TAKEN = 7, MIXED = 9, ALL = 10, ROUNDS = 3 };
    static int in[COUNT * 8], out[TAKEN][COUNT * 8], right[COUNT * 8];
    static float floats[2][COUNT], sums[COUNT];
    MPI_Request requests[ALL];
    MPI_Datatype every_second;
    MPI_Info none = MPI_INFO_NULL;
    int root = 1, index, flag, done, indices[MIXED], word = rank;
    use(MPI_COMM_WORLD);
    MPI_Type_vector(COUNT, 1, 2, MPI_INT, &every_second);
    MPI_Type_commit(&every_second);
    INIT(Allreduce)(MPI_IN_PLACE, out[0], COUNT, MPI_INT, MPI_SUM, comm, none, &requests[0]);
    INIT(Reduce)(in, out[1], COUNT, MPI_UNSIGNED, MPI_SUM, root, comm, none, &requests[1]);
    INIT(Bcast)(out[2], COUNT, MPI_INT, root, comm, none, &requests[2]);
    INIT(Reduce_scatter_block)(in, out[3], COUNT, MPI_INT, MPI_SUM, comm, none, &requests[3]);
    INIT(Allgather)(in, COUNT, MPI_INT, out[4], COUNT, MPI_INT, comm, none, &requests[4]);
    INIT(Barrier)(comm, none, &requests[5]);
    // With a type that is freed before the request starts.
    INIT(Bcast)(out[6], 1, every_second, root, comm, none, &requests[6]);
    // MPI's own. MPICH 4.0.2 waits forever for its inactive collectives among others.
    MPI_Send_init(&rank, 1, MPI_INT, (rank + 1) % ranks, 5, comm, &requests[7]);
    MPI_Recv_init(&word, 1, MPI_INT, (rank + ranks - 1) % ranks, 5, comm, &requests[8]);
    INIT(Allreduce)(floats[0], floats[1], COUNT, MPI_FLOAT, MPI_SUM, comm, none, &requests[9]);
    MPI_Type_free(&every_second);
    // Inactive requests are complete.
    MPI_Waitall(MIXED, requests, MPI_STATUSES_IGNORE);
    MPI_Testany(MIXED, requests, &index, &flag, MPI_STATUS_IGNORE);
    CHECK(flag && index == MPI_UNDEFINED, "%d %d", flag, index);
    for (int round = 0; round < ROUNDS; round++) {
        fill(&TYPES[0], (char *)in, COUNT * 8, rank + round);
        fill(&TYPES[2], (char *)floats[0], COUNT, rank + round);
        memset(out, 0x55, sizeof out);
        memcpy(out[0], in, COUNT * 4);
        if (rank == root) memcpy(out[2], in, COUNT * 4), memcpy(out[6], in, COUNT * 8);
        if (round == 0) {
            MPI_Startall(ALL, requests);
        } else {
            for (int i = 0; i < ALL; i++) MPI_Start(&requests[(i + rank * 2) % ALL]);
        }
        for (int i = 0; i < TAKEN; i++) takes(1, i < 6 ? (enum kind)i : BCAST);
        MPI_Request started[ALL];
        memcpy(started, requests, sizeof started);
        if (round == 0) {
            MPI_Waitall(ALL, requests, MPI_STATUSES_IGNORE);
        } else if (round == 1) {
            for (int i = 0; i < MIXED; i++) {
                MPI_Waitany(MIXED, requests, &index, MPI_STATUS_IGNORE);
                CHECK(index >= 0 && index < MIXED, "%d", index);
            }
            MPI_Waitany(MIXED, requests, &index, MPI_STATUS_IGNORE);
            CHECK(index == MPI_UNDEFINED, "%d", index);
        } else {
            for (flag = 0; !flag;)
                MPI_Request_get_status(requests[0], &flag, MPI_STATUS_IGNORE);
            for (int left = MIXED; left; left -= done) {
                MPI_Waitsome(MIXED, requests, &done, indices, MPI_STATUSES_IGNORE);
                CHECK(done > 0 && done <= left, "%d of %d", done, left);
            }
            for (int i = 0; i < MIXED; i++) {
                MPI_Test(&requests[i], &flag, MPI_STATUS_IGNORE);
                CHECK(flag, "%d", i);
            }
        }
        if (round > 0) MPI_Wait(&requests[MIXED], MPI_STATUS_IGNORE);
        CHECK(!memcmp(started, requests, sizeof started), "round %d", round);
        PMPI_Allreduce(in, right, COUNT, MPI_INT, MPI_SUM, comm);
        same(&TYPES[0], (char *)out[0], (char *)right, COUNT, __LINE__);
        if (rank == root) same(&TYPES[0], (char *)out[1], (char *)right, COUNT, __LINE__);
        PMPI_Reduce_scatter_block(in, right, COUNT, MPI_INT, MPI_SUM, comm);
        same(&TYPES[0], (char *)out[3], (char *)right, COUNT, __LINE__);
        PMPI_Allgather(in, COUNT, MPI_INT, right, COUNT, MPI_INT, comm);
        same(&TYPES[0], (char *)out[4], (char *)right, (size_t)(COUNT * ranks), __LINE__);
        memcpy(right, in, sizeof right);
        PMPI_Bcast(right, COUNT * 2, MPI_INT, root, comm);
        same(&TYPES[0], (char *)out[2], (char *)right, COUNT, __LINE__);
        for (int i = 0; i < COUNT; i++)
            CHECK(out[6][2 * i] == right[2 * i], "%d: %d", i, out[6][2 * i]);
        PMPI_Allreduce(floats[0], sums, COUNT, MPI_FLOAT, MPI_SUM, comm);
        same(&TYPES[2], (char *)floats[1], (char *)sums, COUNT, __LINE__);
        CHECK(word == (rank + ranks - 1) % ranks, "%d", word);
    }
    // An active request ends after it is freed.
    MPI_Start(&requests[5]);
    takes(1, BARRIER);
    for (int i = 0; i < ALL; i++) MPI_Request_free(&requests[i]);
    CHECK(requests[0] == MPI_REQUEST_NULL && requests[5] == MPI_REQUEST_NULL, "not freed");
    // The group of a freed request is used again.
    MPI_Barrier(comm);
    takes(1, BARRIER);
    INIT(Allreduce)(MPI_IN_PLACE, out[0], COUNT, MPI_INT, MPI_SUM, comm, none, &requests[0]);
    memcpy(out[0], in, COUNT * 4);
    MPI_Start(&requests[0]);
    takes(1, ALLREDUCE);
    MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
    MPI_Request_free(&requests[0]);
    PMPI_Allreduce(in, right, COUNT, MPI_INT, MPI_SUM, comm);
    same(&TYPES[0], (char *)out[0], (char *)right, COUNT, __LINE__);
}

// Infinities and NaNs come out as by MPI.
static void not_finite(void) {
    enum { COUNT = 20000 };
    float *in = (float *)space(COUNT * 4), *out = (float *)space(COUNT * 4);
    float *right = (float *)space(COUNT * 4);
    MPI_Request requests[3];
    use(MPI_COMM_WORLD);
    for (int in_place = 0; in_place < 2; in_place++)
        for (int later = 0; later < 2; later++) {
            fill(&TYPES[2], (char *)in, COUNT, rank);
            if (rank == 1) in[5] = INFINITY, in[9000] = NAN;
            memcpy(out, in, COUNT * 4);
            PMPI_Allreduce(in, right, COUNT, MPI_FLOAT, MPI_SUM, comm);
            const void *from = in_place ? MPI_IN_PLACE : in;
            int one = 1;
            if (later) {
                MPI_Iallreduce(from, out, COUNT, MPI_FLOAT, MPI_SUM, comm, &requests[0]);
                MPI_Iallreduce(MPI_IN_PLACE, &one, 1, MPI_INT, MPI_SUM, comm, &requests[1]);
                MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
                CHECK(one == ranks, "%d", one);
                takes(1, ALLREDUCE);
            } else {
                MPI_Allreduce(from, out, COUNT, MPI_FLOAT, MPI_SUM, comm);
            }
            same(&TYPES[2], (char *)out, (char *)right, COUNT, __LINE__);
            CHECK(isinf(out[5]) && isnan(out[9000]) && !isnan(out[6]), "%g %g", out[5], out[9000]);
            takes(!later, ALLREDUCE);
        }
    free(in), free(out), free(right);
}

// A message that only arrives if MPI works on it while its sender is within netsum.
static void beside_messages(void) {
    enum { BYTES = 8 << 20 };
    int sum = 1;
    char *message = space(BYTES);
    MPI_Request request;
    use(MPI_COMM_WORLD);
    if (rank == 0) MPI_Isend(message, BYTES, MPI_BYTE, 1, 0, comm, &request);
    if (rank == 1) MPI_Recv(message, BYTES, MPI_BYTE, 0, 0, comm, MPI_STATUS_IGNORE);
    MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, comm);
    CHECK(sum == ranks, "%d", sum);
    takes(1, ALLREDUCE);
    if (rank == 0) MPI_Wait(&request, MPI_STATUS_IGNORE);
    free(message);
}

static void calls(void) {
    MPI_Comm made, column;
    int sizes[2] = {2, ranks / 2}, periods[2] = {0, 0}, columns[2] = {1, 0}, flag;
    MPI_Request request;
    everything(MPI_COMM_WORLD);
    persistent();
    many();
    not_finite();
    beside_messages();

    // Nonblocking calls do not join.
    MPI_Comm_dup(MPI_COMM_WORLD, &made);
    use(made);
    flag = 1;
    MPI_Iallreduce(MPI_IN_PLACE, &flag, 1, MPI_INT, MPI_SUM, comm, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    CHECK(flag == ranks, "%d", flag);
    everything(made);
    int again = 1;
    MPI_Request persisting;
    INIT(Allreduce)(MPI_IN_PLACE, &again, 1, MPI_INT, MPI_SUM, comm, MPI_INFO_NULL, &persisting);
    MPI_Iallreduce(MPI_IN_PLACE, &flag, 1, MPI_INT, MPI_SUM, comm, &request);
    MPI_Start(&persisting);
    takes(1, ALLREDUCE), takes(1, ALLREDUCE);
    MPI_Comm_free(&made);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    CHECK(flag == ranks * ranks, "%d", flag);
    MPI_Wait(&persisting, MPI_STATUS_IGNORE);
    CHECK(again == ranks, "%d", again);
    MPI_Request_free(&persisting);

    // In the opposite order; rank 1, which is on rank 0's host, is alone.
    MPI_Comm_split(MPI_COMM_WORLD, world_rank == 1, -world_rank, &made);
    everything(made);
    MPI_Comm_free(&made);

    use(MPI_COMM_WORLD);
    MPI_Cart_create(MPI_COMM_WORLD, 2, sizes, periods, 1, &made);
    if (made != MPI_COMM_NULL) {
        MPI_Cart_sub(made, columns, &column);
        everything(column);
        MPI_Comm_free(&column);
        MPI_Comm_free(&made);
    }
    everything(MPI_COMM_SELF);
}

// A handler for errors, whose text is printed.
static void handler(MPI_Comm *failed, int *code, ...) {
    char text[MPI_MAX_ERROR_STRING];
    int length, class;
    (void)failed;
    MPI_Error_class(*code, &class);
    MPI_Error_string(*code, text, &length);
    printf("rank %d handles class %s: %s\n", world_rank, class > MPI_ERR_LASTCODE ? "own" : "MPI's",
           text);
    fflush(stdout);
}

static void die(const char *file) {
    enum { COUNT = 1 << 22 };
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s%d", file, world_rank);
    if (!freopen(name, "w", stdout)) abort();
    setvbuf(stdout, NULL, _IOLBF, 0);
    int *data = (int *)space(COUNT * 4), code;
    MPI_Errhandler own;
    MPI_Request request;
    use(MPI_COMM_WORLD);
    MPI_Comm_create_errhandler(handler, &own);
    // The communicator's own handler, and not that of MPI_COMM_WORLD, which would abort.
    MPI_Comm other;
    MPI_Comm_dup(comm, &other);
    use(other);
    MPI_Comm_set_errhandler(comm, own);
    MPI_Allreduce(MPI_IN_PLACE, data, COUNT, MPI_INT, MPI_SUM, comm);
    MPI_Iallreduce(MPI_IN_PLACE, data, COUNT, MPI_INT, MPI_SUM, comm, &request);
    if (rank == ranks - 1) kill(getpid(), SIGKILL);
    code = MPI_Wait(&request, MPI_STATUS_IGNORE);
    CHECK(code != MPI_SUCCESS, "no error");
    code = MPI_Allreduce(MPI_IN_PLACE, data, COUNT, MPI_INT, MPI_SUM, comm);
    CHECK(code != MPI_SUCCESS, "no error");
    for (int way = 0; way < 16; way++) {
        MPI_Iallreduce(MPI_IN_PLACE, data, COUNT, MPI_INT, MPI_SUM, comm, &request);
        code = finish(&request);
        CHECK(code != MPI_SUCCESS, "no error by way %d", way);
    }
    // The handler of a communicator that is freed before its error is reported.
    MPI_Iallreduce(MPI_IN_PLACE, data, COUNT, MPI_INT, MPI_SUM, comm, &request);
    for (int flag = 0; !flag;) MPI_Request_get_status(request, &flag, MPI_STATUS_IGNORE);
    MPI_Comm_free(&comm);
    code = MPI_Wait(&request, MPI_STATUS_IGNORE);
    CHECK(code != MPI_SUCCESS, "no error");
    printf("rank %d has an error\n", world_rank);
    fflush(stdout);
    // MPI's end would wait for the dead rank.
    _exit(0);
}

#ifdef MPICH
static void leave(int signal) {
    (void)signal;
    _exit(0);
}
#endif

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "all";
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    use(MPI_COMM_WORLD);
    if (!strcmp(what, "die")) die(argv[2]);
    else if (!strcmp(what, "plain")) reductions(&TYPES[0], 100, MPI_SUM);
    else calls();
    PMPI_Barrier(MPI_COMM_WORLD);
    if (world_rank == 0)
        for (int kind = 0; kind < KINDS; kind++)
            printf("expected %s: netsum %d calls\n", NAMES[kind], expected[kind]);
    fflush(stdout);
#ifdef MPICH
    // MPICH 4.0.2 may hang in its own end over UCX's TCP, also without netsum.
    signal(SIGALRM, leave);
    alarm(3);
#endif
    return MPI_Finalize();
}
