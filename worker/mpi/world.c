// Joins netsum, and leaves it; what each communicator has of it; settings.

#include "world.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static bool begun, joined, counts;
static int keyval = MPI_KEYVAL_INVALID, world_rank;
// Groups that wait for a blocking call.
static int wanted;
static long long min_bytes = -1;

long long netsum_mpi_min_bytes(void) { return min_bytes; }

static const char *variable(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static int when_freed(MPI_Comm comm, int key, void *group, void *extra) {
    (void)key, (void)extra, (void)group;
    netsum_mpi_freed(comm);
    return MPI_SUCCESS;
}

static netsum_status connect(const char *group, int rank, int ranks, netsum_comm **net) {
    netsum_config *config = NULL;
    char numbers[2][12];
    snprintf(numbers[0], sizeof numbers[0], "%d", rank);
    snprintf(numbers[1], sizeof numbers[1], "%d", ranks);
    netsum_status status = netsum_config_new(&config);
    if (!status) status = netsum_config_set(config, "rank", numbers[0]);
    if (!status) status = netsum_config_set(config, "ranks", numbers[1]);
    if (!status && group) status = netsum_config_set(config, "group", group);
    if (!status) status = netsum_init(config, net);
    netsum_config_free(config);
    return status;
}

// Whether all ranks are on one host, whose memory is faster than any network.
static bool is_one_host(MPI_Comm comm, int ranks) {
    MPI_Comm host = MPI_COMM_NULL;
    int here = 0;
    PMPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    PMPI_Comm_size(host, &here);
    PMPI_Comm_free(&host);
    return here == ranks;
}

// Returns whether no rank has a reason against netsum; otherwise rank 0 prints the first one. A rank
// that must seal its sums ends the program then: MPI's own collectives are in clear.
static bool agree(MPI_Comm comm, int rank, int ranks, const char *reason, bool must_seal) {
    static bool said;
    char text[512];
    int mine = reason ? rank : ranks, first = ranks;
    PMPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, comm);
    if (first == ranks) return true;
    if (rank == first) snprintf(text, sizeof text, "%s", reason);
    PMPI_Bcast(text, sizeof text, MPI_CHAR, first, comm);
    const char *unit = joined ? "a communicator" : "the job";
    int clear_is_wrong = must_seal, wrong_at_any = 0;
    PMPI_Allreduce(&clear_is_wrong, &wrong_at_any, 1, MPI_INT, MPI_MAX, comm);
    if (rank == 0 && wrong_at_any)
        fprintf(stderr, "netsum-mpi: the program ends: %s cannot use netsum, and a secret is set, "
                        "but MPI's own collectives are in clear: rank %d: %s\n",
                unit, first, text);
    else if (rank == 0 && !said)
        fprintf(stderr, "netsum-mpi: %s uses MPI's own collectives: rank %d: %s\n",
                unit, first, text);
    said = true;
    // Rank 0 has printed.
    PMPI_Barrier(comm);
    if (must_seal) PMPI_Abort(MPI_COMM_WORLD, 1);
    return false;
}

// All ranks of the communicator join netsum, or none.
static void join(struct group *group, MPI_Comm comm) {
    int rank, ranks, is_inter;
    group->tried = true;
    PMPI_Comm_test_inter(comm, &is_inter);
    PMPI_Comm_size(comm, &ranks);
    if (is_inter || ranks < 2) return;
    PMPI_Comm_rank(comm, &rank);
    bool has_peers = variable("NETSUM_PEERS");
    bool is_sealed = variable("NETSUM_SECRET") || variable("NETSUM_SECRET_FILE");
    const char *reason = NULL;
    if (!has_peers && !variable("NETSUM_JOB")) reason = "NETSUM_JOB and NETSUM_PEERS are not set";
    if (joined && has_peers) reason = "groups need a box, and NETSUM_PEERS is set";
    bool one_host = is_one_host(comm, ranks);
    if (one_host) reason = "all ranks are on one host";
    if (!agree(comm, rank, ranks, reason, is_sealed && !one_host)) return;
    char name[32];
    uint32_t random = 0;
    if (getrandom(&random, sizeof random, 0) < 0) random = (uint32_t)(uintptr_t)group;
    snprintf(name, sizeof name, "mpi-%d-%08x", world_rank, random);
    PMPI_Bcast(name, sizeof name, MPI_CHAR, 0, comm);
    netsum_comm *net = NULL;
    if (connect(joined ? name : NULL, rank, ranks, &net)) reason = netsum_error_text();
    else if (!has_peers && !is_sealed && netsum_get_mode(net) != NETSUM_BOX)
        reason = "the box does not sum";
    if (!agree(comm, rank, ranks, reason, is_sealed)) {
        netsum_finalize(net);
        return;
    }
    // A split copies no attributes, whose functions are the program's.
    PMPI_Comm_split(comm, 0, rank, &group->own);
    PMPI_Comm_set_errhandler(group->own, MPI_ERRORS_RETURN);
    group->net = net;
}

// A group of its own, since MPI lets each rank start its requests in another order, and netsum does
// not. Those of freed requests are used again.
static struct group *persistent_group(MPI_Comm comm) {
    unsigned long long idle = 0, all = 0;
    struct group *group;
    for (int i = 0; i < 64 && (group = netsum_mpi_persistent(comm, i)); i++)
        if (group->idle && !group->first) idle |= 1ULL << i;
    PMPI_Allreduce(&idle, &all, 1, MPI_UNSIGNED_LONG_LONG, MPI_BAND, comm);
    if (all) {
        group = netsum_mpi_persistent(comm, __builtin_ctzll(all));
    } else {
        join(group = netsum_mpi_add(comm), comm);
        group->persistent = group->net;
    }
    group->idle = false;
    return group->net ? group : NULL;
}

struct group *netsum_mpi_group(MPI_Comm comm, enum form form, bool worth) {
    struct group *group = NULL;
    int found = 0;
    if (!joined || comm == MPI_COMM_NULL) return NULL;
    if (!worth && !(form == BLOCKING && __atomic_load_n(&wanted, __ATOMIC_RELAXED))) return NULL;
    if (PMPI_Comm_get_attr(comm, keyval, &group, &found)) return NULL;
    if (!found) PMPI_Comm_set_attr(comm, keyval, group = netsum_mpi_add(comm));
    if (form == PERSISTENT) return persistent_group(comm);
    if (!group->tried && form == BLOCKING && (worth || group->wanted)) {
        if (group->wanted) __atomic_sub_fetch(&wanted, 1, __ATOMIC_RELAXED);
        join(group, comm);
    } else if (!group->tried && !group->wanted && worth) {
        group->wanted = true;
        __atomic_add_fetch(&wanted, 1, __ATOMIC_RELAXED);
    }
    return group->net && worth ? group : NULL;
}

static void begin(void) {
    PMPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    const char *statistics = variable("NETSUM_MPI_STATS");
    counts = statistics && strcmp(statistics, "0");
    const char *least = variable("NETSUM_MPI_MIN_BYTES");
    char *end = NULL;
    long long own = least ? strtoll(least, &end, 10) : -1;
    if (least && (*end || own < 0)) {
        fprintf(stderr, "netsum-mpi: rank %d: NETSUM_MPI_MIN_BYTES %s is not a number of bytes\n",
                world_rank, least);
        own = -1;
    }
    // The same at all ranks, or they would choose differently.
    PMPI_Allreduce(&own, &min_bytes, 1, MPI_LONG_LONG, MPI_MAX, MPI_COMM_WORLD);
    PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, when_freed, &keyval, NULL);
    struct group *world = netsum_mpi_add(MPI_COMM_WORLD);
    PMPI_Comm_set_attr(MPI_COMM_WORLD, keyval, world);
    netsum_mpi_begin();
    join(world, MPI_COMM_WORLD);
    joined = world->net;
    begun = true;
}

int MPI_Init(int *argc, char ***argv) {
    int error = PMPI_Init(argc, argv);
    if (!error) begin();
    return error;
}

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
    int error = PMPI_Init_thread(argc, argv, required, provided);
    if (!error) begin();
    return error;
}

int MPI_Finalize(void) {
    // Fortran's start bypasses this library.
    if (!begun) return PMPI_Finalize();
    while (netsum_mpi_progress()) netsum_mpi_doze();
    if (counts && world_rank == 0) netsum_mpi_print_counts();
    netsum_mpi_leave();
    joined = false;
    return PMPI_Finalize();
}
