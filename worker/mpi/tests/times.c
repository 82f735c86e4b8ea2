// Times each call by netsum and by MPI, in turns. Run with NETSUM_MPI_MIN_BYTES=0. Prints the
// medians of the slowest rank's times in ms: `times ROUNDS BYTES...`, bytes of the result.

#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { KINDS = 7 };
static const char *const NAMES[KINDS] = {
    "Allreduce int", "Allreduce float", "Reduce", "Bcast", "Reduce_scatter_block", "Allgather",
    "Barrier",
};

static void run(int kind, int by_mpi, char *in, char *out, int count, int ranks) {
    int part = count / ranks > 0 ? count / ranks : 1;
    MPI_Comm w = MPI_COMM_WORLD;
    switch (2 * kind + by_mpi) {
    case 0: MPI_Allreduce(in, out, count, MPI_INT, MPI_SUM, w); break;
    case 1: PMPI_Allreduce(in, out, count, MPI_INT, MPI_SUM, w); break;
    case 2: MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, w); break;
    case 3: PMPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, w); break;
    case 4: MPI_Reduce(in, out, count, MPI_INT, MPI_SUM, 0, w); break;
    case 5: PMPI_Reduce(in, out, count, MPI_INT, MPI_SUM, 0, w); break;
    case 6: MPI_Bcast(out, count, MPI_INT, 0, w); break;
    case 7: PMPI_Bcast(out, count, MPI_INT, 0, w); break;
    case 8: MPI_Reduce_scatter_block(in, out, part, MPI_INT, MPI_SUM, w); break;
    case 9: PMPI_Reduce_scatter_block(in, out, part, MPI_INT, MPI_SUM, w); break;
    case 10: MPI_Allgather(in, part, MPI_INT, out, part, MPI_INT, w); break;
    case 11: PMPI_Allgather(in, part, MPI_INT, out, part, MPI_INT, w); break;
    case 12: MPI_Barrier(w); break;
    default: PMPI_Barrier(w); break;
    }
}

static int order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

#ifdef MPICH
static void leave(int signal) {
    (void)signal;
    _exit(0);
}
#endif

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, ranks, rounds = atoi(argv[1]);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int kind = 0; kind < KINDS; kind++)
        for (int arg = 2; arg < (kind == KINDS - 1 ? 3 : argc); arg++) {
            size_t bytes = (size_t)atol(argv[arg]);
            char *in = calloc(1, bytes + 64), *out = calloc(1, bytes + 64);
            double *times = malloc(2 * sizeof(double) * (size_t)rounds);
            if (!in || !out || !times) return 1;
            for (int turn = -2; turn < 2 * rounds; turn++) {
                PMPI_Barrier(MPI_COMM_WORLD);
                double start = MPI_Wtime(), time, longest;
                run(kind, turn & 1, in, out, (int)(bytes / 4), ranks);
                time = MPI_Wtime() - start;
                PMPI_Allreduce(&time, &longest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
                if (turn >= 0) times[(turn & 1) * rounds + turn / 2] = longest;
            }
            qsort(times, (size_t)rounds, sizeof *times, order);
            qsort(times + rounds, (size_t)rounds, sizeof *times, order);
            if (rank == 0)
                printf("%s %zu: netsum %.2f MPI %.2f\n", NAMES[kind], bytes,
                       times[rounds / 2] * 1e3, times[rounds + rounds / 2] * 1e3);
            fflush(stdout);
            free(in), free(out), free(times);
        }
    fflush(stdout);
    PMPI_Barrier(MPI_COMM_WORLD);
#ifdef MPICH
    // MPICH 4.0.2 may hang in its own end over UCX's TCP, also without netsum.
    alarm(3);
    signal(SIGALRM, leave);
#endif
    return MPI_Finalize();
}
