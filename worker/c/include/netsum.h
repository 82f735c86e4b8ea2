// netsum: all-reduce inside the network. Link with -lnetsum.
//
// Every function may be called by any thread. Functions that return a netsum_status leave a text in netsum_error_text().

#ifndef NETSUM_H
#define NETSUM_H

// Made of worker/c/src by the test worker/c/tests/header.rs. Do not edit.

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// What a function came to. netsum_error_text() says more.
typedef enum {
  // It is done.
  NETSUM_OK = 0,
  // An argument makes no sense. The communicator can still be used, if all ranks get this of the
  // same call.
  NETSUM_ERROR_ARGUMENT = 1,
  // A setting is missing or wrong, or contradicts the job's.
  NETSUM_ERROR_CONFIG = 2,
  // The box's daemon could not be reached, refused, or ranks are missing.
  NETSUM_ERROR_CONTROLLER = 3,
  // A rank did not answer when the connections were opened: netsum_error_rank().
  NETSUM_ERROR_UNREACHABLE = 4,
  // A rank has died: netsum_error_rank().
  NETSUM_ERROR_RANK_DIED = 5,
  // A rank has left the job, and is needed: netsum_error_rank().
  NETSUM_ERROR_RANK_LEFT = 6,
  // The ranks called for different operations.
  NETSUM_ERROR_MISMATCH = 7,
  // An element is infinite or no number at some rank. The communicator can still be used.
  NETSUM_ERROR_NON_FINITE = 8,
  // The communicator was finalized before the operation was complete.
  NETSUM_ERROR_CLOSED = 9,
  // This process was forked from the one that connected.
  NETSUM_ERROR_FORKED = 10,
  // A socket, an adapter or the job has failed.
  NETSUM_ERROR_FAILED = 11,
  // A defect of the library.
  NETSUM_ERROR_INTERNAL = 12,
} netsum_status;

// Who sums.
typedef enum {
  // The box.
  NETSUM_BOX = 0,
  // The ranks themselves, by an ordinary ring.
  NETSUM_RING = 1,
} netsum_mode;

// A member of a job. Several threads may use it at once; their calls take turns. All ranks must
// call for the same operations in the same order, with the same counts, types, roots and
// operators; where they do not, all get NETSUM_ERROR_MISMATCH. So do the others where one alone
// gets NETSUM_ERROR_ARGUMENT.
typedef struct netsum_comm netsum_comm;

// Settings. One thread at a time may use one.
typedef struct netsum_config netsum_config;

// An operation in flight. It must be given to netsum_wait() once; until that, or
// netsum_finalize(), has returned, its memory belongs to the operation: another one that would
// write it, or use what it writes, is NETSUM_ERROR_ARGUMENT. Several threads may test it.
typedef struct netsum_work netsum_work;

// Element types.
typedef uint32_t netsum_dtype;

// What is made of all ranks' elements.
typedef uint32_t netsum_op;

// What an operation came to.
typedef struct {
  // Who did the sum; NETSUM_RING if the ranks did any part of it.
  netsum_mode mode;
  // Seconds since the call.
  double elapsed;
  // Sums of messages that were checked.
  uint64_t verified;
  // Floats of this rank that were not zero and counted as 0, as they are so small beside the
  // largest of their message.
  uint64_t underflows;
} netsum_report;

// 32-bit integers, with a sign or without, summed modulo 2^32.
#define NETSUM_INT32 1

// Single precision floats.
#define NETSUM_FLOAT32 2

// Their sum.
#define NETSUM_SUM 0

// Their sum divided by the number of ranks; of floats only.
#define NETSUM_AVERAGE 1

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library: "0.1.0".
const char *netsum_version(void);

// Joins a job, and returns when all ranks are there. `config` may be NULL: the environment tells
// then. To be ended with netsum_finalize(). `*comm` is NULL where that fails.
//
// The caller promises:
// `config` is NULL or comes from netsum_config_new(); `comm` points to room for a pointer.
netsum_status netsum_init(const netsum_config *config, netsum_comm **comm);

// Leaves the job, and frees the communicator; NULL is left alone. Operations in flight are
// completed where the other ranks get there within two seconds; netsum_wait() says
// NETSUM_ERROR_CLOSED of others. After that no operation touches memory.
//
// The caller promises:
// `comm` comes from netsum_init(), and no thread uses it any more.
void netsum_finalize(netsum_comm *comm);

// This rank, from 0.
//
// The caller promises:
// `comm` comes from netsum_init().
uint32_t netsum_rank(const netsum_comm *comm);

// Ranks of the job.
//
// The caller promises:
// `comm` comes from netsum_init().
uint32_t netsum_ranks(const netsum_comm *comm);

// Who sums: the box, until the ranks find that none does.
//
// The caller promises:
// `comm` comes from netsum_init().
netsum_mode netsum_get_mode(const netsum_comm *comm);

// Replaces each of `count` elements by the sum of all ranks' elements at its place, or their
// average; the same bits at every rank. `work` is where a handle for netsum_wait() goes, or NULL
// where the operation cannot be started; where `work` itself is NULL, the call waits.
//
// The caller promises:
// `data` has `count` elements, which are the operation's until it is done.
netsum_status netsum_all_reduce(netsum_comm *comm,
                                void *data,
                                size_t count,
                                netsum_dtype dtype,
                                netsum_op op,
                                netsum_work **work);

// The same, for rank `root` alone; the others keep what they have.
//
// The caller promises:
// As netsum_all_reduce().
netsum_status netsum_reduce(netsum_comm *comm,
                            void *data,
                            size_t count,
                            netsum_dtype dtype,
                            netsum_op op,
                            uint32_t root,
                            netsum_work **work);

// Sums `count` elements for each rank, and puts rank r's of the sum into rank r's `output`.
// `input` has `count` times as many as there are ranks; its r-th part may be `output`, and
// otherwise they share no memory. `work` as with netsum_all_reduce().
//
// The caller promises:
// `input` and `output` have their elements, which are the operation's until it is done.
netsum_status netsum_reduce_scatter(netsum_comm *comm,
                                    void *output,
                                    const void *input,
                                    size_t count,
                                    netsum_dtype dtype,
                                    netsum_op op,
                                    netsum_work **work);

// Gives all ranks the bytes of rank `root`. `work` as with netsum_all_reduce().
//
// The caller promises:
// `data` has `bytes` bytes, which are the operation's until it is done.
netsum_status netsum_broadcast(netsum_comm *comm,
                               void *data,
                               size_t bytes,
                               uint32_t root,
                               netsum_work **work);

// Gives all ranks the `bytes` bytes at each rank's `input`, one behind the other in `output`,
// which has room for those of all ranks. `input` may be this rank's part of it, and otherwise they
// share no memory. `work` as with netsum_all_reduce().
//
// The caller promises:
// `input` and `output` have their bytes, which are the operation's until it is done.
netsum_status netsum_all_gather(netsum_comm *comm,
                                void *output,
                                const void *input,
                                size_t bytes,
                                netsum_work **work);

// Gives rank r the r-th `bytes` bytes of each rank's `input`, one behind the other in `output`.
// Both have room for those of all ranks. It takes as many times as long as there are ranks as
// connections between them would. `work` as with netsum_all_reduce().
//
// The caller promises:
// `input` and `output` have their bytes, which are the operation's until it is done.
netsum_status netsum_all_to_all(netsum_comm *comm,
                                void *output,
                                const void *input,
                                size_t bytes,
                                netsum_work **work);

// Is done once all ranks have called it, and all that was in flight before is done. `work` as with
// netsum_all_reduce().
//
// The caller promises:
// As of the arguments of netsum_all_reduce().
netsum_status netsum_barrier(netsum_comm *comm, netsum_work **work);

// Makes settings of what the environment says: NETSUM_RANK, NETSUM_RANKS, NETSUM_CONTROLLER,
// NETSUM_JOB, NETSUM_TOKEN and the others; what torchrun, mpirun and srun tell of rank, ranks and
// local rank. To be freed with netsum_config_free().
//
// The caller promises:
// `config` points to room for a pointer.
netsum_status netsum_config_new(netsum_config **config);

// Replaces one setting: "rank" is what NETSUM_RANK is in the environment, and so on.
//
// The caller promises:
// `config` comes from netsum_config_new(); the texts end with a null byte.
netsum_status netsum_config_set(netsum_config *config, const char *name, const char *value);

// Frees settings; NULL is left alone.
//
// The caller promises:
// `config` comes from netsum_config_new(), and is not used any more.
void netsum_config_free(netsum_config *config);

// The text of this thread's last error: what is wrong, and what to do. It is there until the
// thread's next error.
const char *netsum_error_text(void);

// The rank that this thread's last error is about, or -1.
int32_t netsum_error_rank(void);

// Puts into `done` whether netsum_wait() would return at once. Never blocks.
//
// The caller promises:
// `work` comes from an operation, and `done` points to room.
netsum_status netsum_test(const netsum_work *work, bool *done);

// Waits for so many seconds at the most, and no longer than a day, and puts into `done` whether
// netsum_wait() would return at once.
//
// The caller promises:
// `work` comes from an operation, and `done` points to room.
netsum_status netsum_wait_for(const netsum_work *work, double seconds, bool *done);

// Waits for an operation, frees its handle, and says what it came to: in `report`, unless that is
// NULL. The memory belongs to the caller again, whatever is returned.
//
// The caller promises:
// `work` comes from an operation, and is not used any more; `report` is NULL or points to room.
netsum_status netsum_wait(netsum_work *work, netsum_report *report);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* NETSUM_H */
