/* Sums a vector over all ranks, and the next ones while it computes.
 *
 *     cc all_reduce.c -I worker/c/include -L target/release -lnetsum -o all_reduce
 *     RANK=0 WORLD_SIZE=2 NETSUM_PEERS=10.0.0.1,10.0.0.2 ./all_reduce
 */
#include <netsum.h>

#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 100000, BUCKETS = 8 };

static void check(netsum_status status, const char *what) {
    if (status != NETSUM_OK) {
        fprintf(stderr, "%s: %s\n", what, netsum_error_text());
        exit(1);
    }
}

int main(void) {
    netsum_comm *comm;
    /* Rank, box and token from the environment; returns when all ranks have joined. */
    check(netsum_init(NULL, &comm), "netsum_init");
    uint32_t rank = netsum_rank(comm), ranks = netsum_ranks(comm);

    float *gradient = malloc(COUNT * sizeof *gradient);
    for (int i = 0; i < COUNT; i++) gradient[i] = rank + 0.5f;
    /* NULL: the call waits. */
    check(netsum_all_reduce(comm, gradient, COUNT, NETSUM_FLOAT32, NETSUM_SUM, NULL),
          "netsum_all_reduce");
    float sum = ranks * (ranks - 1) / 2.0f + ranks * 0.5f;
    for (int i = 0; i < COUNT; i++) {
        if (gradient[i] != sum) {
            fprintf(stderr, "element %d: %g, not %g\n", i, gradient[i], sum);
            return 1;
        }
    }

    /* In flight, in this order at every rank. A bucket is not touched before its netsum_wait(). */
    static int32_t buckets[BUCKETS][COUNT];
    netsum_work *work[BUCKETS];
    for (int b = 0; b < BUCKETS; b++) {
        for (int i = 0; i < COUNT; i++) buckets[b][i] = (int32_t)rank + b;
        check(netsum_all_reduce(comm, buckets[b], COUNT, NETSUM_INT32, NETSUM_SUM, &work[b]),
              "bucket");
    }
    netsum_report report;
    for (int b = 0; b < BUCKETS; b++) {
        check(netsum_wait(work[b], &report), "netsum_wait");
        if (buckets[b][COUNT - 1] != (int32_t)(ranks * (ranks - 1) / 2 + ranks * b)) {
            fprintf(stderr, "bucket %d: %d\n", b, buckets[b][COUNT - 1]);
            return 1;
        }
    }
    check(netsum_barrier(comm, NULL), "netsum_barrier");
    printf("netsum %s: rank %u has %g everywhere, summed by the %s in %g s\n", netsum_version(),
           rank, sum, report.mode == NETSUM_BOX ? "box" : "ring", report.elapsed);
    free(gradient);
    netsum_finalize(comm);
    return 0;
}
