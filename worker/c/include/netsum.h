// netsum: all-reduce inside the network. Link with -lnetsum.
//
// Every function may be called by any thread. Functions that return a netsum_status leave a text in
// netsum_error_text().

#ifndef NETSUM_H
#define NETSUM_H

// Made of worker/c/src by the test worker/c/tests/header.rs. Do not edit.

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// Bytes of the header that netsum_job_header() writes.
#define NETSUM_JOB_HEADER_SIZE 48

// The result of a function. netsum_error_text() has details.
typedef enum {
  // Success.
  NETSUM_OK = 0,
  // An argument is not valid. The communicator can still be used, if all ranks get this for the
  // same call.
  NETSUM_ERROR_ARGUMENT = 1,
  // A setting is missing or wrong, or contradicts the job's.
  NETSUM_ERROR_CONFIG = 2,
  // The controller could not be reached, it refused, or ranks are missing.
  NETSUM_ERROR_CONTROLLER = 3,
  // A rank did not answer when the connections were opened: netsum_error_rank().
  NETSUM_ERROR_UNREACHABLE = 4,
  // A rank has died: netsum_error_rank().
  NETSUM_ERROR_RANK_DIED = 5,
  // A rank has left the job, but is needed: netsum_error_rank().
  NETSUM_ERROR_RANK_LEFT = 6,
  // The ranks called for different operations.
  NETSUM_ERROR_MISMATCH = 7,
  // One of over 4,096 floats is an infinity or a NaN at some rank. The communicator can still be
  // used.
  NETSUM_ERROR_NON_FINITE = 8,
  // The communicator was finalized before the operation was complete.
  NETSUM_ERROR_CLOSED = 9,
  // This process was forked from the one that connected.
  NETSUM_ERROR_FORKED = 10,
  // A socket or an adapter has failed, or the ranks contradict each other.
  NETSUM_ERROR_FAILED = 11,
  // The job has failed: a rank gave up, or the job was deleted.
  NETSUM_ERROR_JOB_FAILED = 12,
  // A defect of the library.
  NETSUM_ERROR_INTERNAL = 13,
} netsum_status;

// Whether the box or the ring sums.
typedef enum {
  // The box.
  NETSUM_BOX = 0,
  // The hosts' ring.
  NETSUM_HOST_RING = 1,
} netsum_mode;

// A member of a job. Several threads may use it at once; their calls are serialized. All ranks
// must call the same operations in the same order, with the same counts, types, roots and
// operators; otherwise all get NETSUM_ERROR_MISMATCH. If only one rank gets NETSUM_ERROR_ARGUMENT,
// the others get NETSUM_ERROR_MISMATCH, too.
typedef struct netsum_comm netsum_comm;

// Settings. One thread at a time may use one.
typedef struct netsum_config netsum_config;

// An operation in flight. It must be passed to netsum_wait() once. Its memory belongs to the
// operation until that, or netsum_finalize(), has returned: another operation that would write it,
// or use what it writes, gets NETSUM_ERROR_ARGUMENT. Several threads may test it.
typedef struct netsum_work netsum_work;

// Element types.
typedef uint32_t netsum_dtype;

// How all ranks' elements are reduced. With N ranks NETSUM_MIN, NETSUM_MAX, NETSUM_PRODUCT and all
// operations on NETSUM_FLOAT64 send N times the bytes of the elements.
typedef uint32_t netsum_op;

// A message that an application sends to the next rank of its ring, by itself.
typedef struct {
  // The in-band token that `netsum job create --in-band` prints: 32 hexadecimal digits.
  const char *token;
  // The ring of the job, from 0.
  uint32_t ring;
  // The sending rank, from 0.
  uint32_t rank;
  // Ranks of the job.
  uint32_t ranks;
  // Number of the message on its connection, from 0.
  uint32_t number;
  // Packets of the message: its bytes, with the header, divided by the path MTU and rounded up.
  uint32_t packets;
  // Packets of all messages before it on its connection.
  uint32_t packets_before;
} netsum_message;

// The result of an operation.
typedef struct {
  // NETSUM_HOST_RING if the hosts' ring summed any part.
  netsum_mode mode;
  // Seconds since the call.
  double elapsed;
  // Sums of messages that were checked with all their data. Over the hosts' ring, a rank counts
  // only those whose data it gets.
  uint64_t verified;
  // This rank's floats that became 0, because their block has far larger ones; not in 16 bits,
  // where they are kept on the average.
  uint64_t underflows;
  // Whether the ranks of each host added their data before they sent it.
  bool hierarchical;
} netsum_report;

// 32-bit integers. Sums and products of all integers are modulo two to the power of the width.
#define NETSUM_INT32 1

// Single precision floats. Their sums have a scale for each block of 1,024.
#define NETSUM_FLOAT32 2

// Half precision floats. Long sums of them take 16 bits each on the links.
#define NETSUM_FLOAT16 3

// Floats of 16 bits with the exponents of NETSUM_FLOAT32. Their sums are as those of
// NETSUM_FLOAT16.
#define NETSUM_BFLOAT16 4

// 8-bit integers.
#define NETSUM_INT8 5

// 8-bit integers without a sign.
#define NETSUM_UINT8 6

// 16-bit integers.
#define NETSUM_INT16 7

// 16-bit integers without a sign.
#define NETSUM_UINT16 8

// 32-bit integers without a sign.
#define NETSUM_UINT32 9

// 64-bit integers.
#define NETSUM_INT64 10

// 64-bit integers without a sign.
#define NETSUM_UINT64 11

// Double precision floats. Sums are rounded after each rank.
#define NETSUM_FLOAT64 12

// Bytes that are true unless they are 0. The sum is the or.
#define NETSUM_BOOL 13

// Their sum.
#define NETSUM_SUM 0

// Their sum divided by the number of ranks; of floats only.
#define NETSUM_AVERAGE 1

// The smallest. A NaN at any rank is the result, and -0 is less than +0.
#define NETSUM_MIN 2

// The largest, in the same order.
#define NETSUM_MAX 3

// Their product; of floats rounded after each rank.
#define NETSUM_PRODUCT 4

// The bitwise and; of integers and NETSUM_BOOL.
#define NETSUM_BAND 5

// The bitwise or; of integers and NETSUM_BOOL.
#define NETSUM_BOR 6

// The bitwise exclusive or; of integers and NETSUM_BOOL.
#define NETSUM_BXOR 7

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library: "0.1.0".
const char *netsum_version(void);

// Joins a job, and returns when all ranks have joined. If `config` is NULL, the environment is
// used. netsum_finalize() leaves the job. If this fails, `*comm` is NULL.
//
// The caller promises:
// `config` is NULL or comes from netsum_config_new(); `comm` points to room for a pointer.
netsum_status netsum_init(const netsum_config *config, netsum_comm **comm);

// Makes a communicator of all ranks of `comm` that pass the same `color`, in the order of their
// `key`, and of their ranks where keys are equal. All ranks of `comm` must call it. With a
// negative `color`, or if this fails, `*part` is NULL. netsum_finalize() leaves the group.
//
// The caller promises:
// `comm` comes from netsum_init() or netsum_split(); `part` points to room for a pointer.
netsum_status netsum_split(netsum_comm *comm, int32_t color, int32_t key, netsum_comm **part);

// Leaves the job, and frees the communicator; does nothing for NULL. Completes operations in
// flight if the other ranks call them within two seconds; for others netsum_wait() returns
// NETSUM_ERROR_CLOSED. Afterwards no operation touches memory.
//
// The caller promises:
// `comm` comes from netsum_init() or netsum_split(), and no thread uses it afterwards.
void netsum_finalize(netsum_comm *comm);

// This rank, from 0.
//
// The caller promises:
// `comm` comes from netsum_init() or netsum_split().
uint32_t netsum_rank(const netsum_comm *comm);

// Ranks of the job.
//
// The caller promises:
// `comm` comes from netsum_init() or netsum_split().
uint32_t netsum_ranks(const netsum_comm *comm);

// Whether the box sums, or the hosts' ring after a fallback.
//
// The caller promises:
// `comm` comes from netsum_init() or netsum_split().
netsum_mode netsum_get_mode(const netsum_comm *comm);

// Replaces each of `count` elements by the sum of all ranks' elements at its place, or what `op`
// makes of them; the same bits at every rank. `*work` becomes a handle for netsum_wait(), or NULL
// if the operation cannot be started. If `work` is NULL, the call waits.
//
// The caller promises:
// `data` has `count` elements, which belong to the operation until it is done.
netsum_status netsum_all_reduce(netsum_comm *comm,
                                void *data,
                                size_t count,
                                netsum_dtype dtype,
                                netsum_op op,
                                netsum_work **work);

// The same, but only rank `root` gets the result; the others' data is unchanged.
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

// Reduces `count` elements for each rank, and writes rank r's part of the result to rank r's
// `output`.
// `input` has `count` elements for each rank; its part for this rank may be `output`, otherwise
// they must not share memory. `work` as with netsum_all_reduce().
//
// The caller promises:
// `input` and `output` have their elements, which belong to the operation until it is done.
netsum_status netsum_reduce_scatter(netsum_comm *comm,
                                    void *output,
                                    const void *input,
                                    size_t count,
                                    netsum_dtype dtype,
                                    netsum_op op,
                                    netsum_work **work);

// Copies the bytes of rank `root` to all ranks. `work` as with netsum_all_reduce().
//
// The caller promises:
// `data` has `bytes` bytes, which belong to the operation until it is done.
netsum_status netsum_broadcast(netsum_comm *comm,
                               void *data,
                               size_t bytes,
                               uint32_t root,
                               netsum_work **work);

// Concatenates the `bytes` bytes of each rank's `input` in all ranks' `output`, which has room for
// those of all ranks. `input` may be this rank's part of `output`, otherwise they must not share
// memory. `work` as with netsum_all_reduce().
//
// The caller promises:
// `input` and `output` have their bytes, which belong to the operation until it is done.
netsum_status netsum_all_gather(netsum_comm *comm,
                                void *output,
                                const void *input,
                                size_t bytes,
                                netsum_work **work);

// Concatenates the r-th `bytes` bytes of each rank's `input` in rank r's `output`. Both have room
// for `bytes` bytes of each rank. With N ranks it takes up to N times as long as direct
// connections would. `work` as with netsum_all_reduce().
//
// The caller promises:
// `input` and `output` have their bytes, which belong to the operation until it is done.
netsum_status netsum_all_to_all(netsum_comm *comm,
                                void *output,
                                const void *input,
                                size_t bytes,
                                netsum_work **work);

// Completes once all ranks have called it, and all earlier operations have completed. `work` as
// with netsum_all_reduce().
//
// The caller promises:
// As of the arguments of netsum_all_reduce().
netsum_status netsum_barrier(netsum_comm *comm, netsum_work **work);

// Creates settings from the environment: NETSUM_RANK, NETSUM_RANKS, NETSUM_CONTROLLER, NETSUM_JOB,
// NETSUM_TOKEN and the others, and rank, ranks and local rank from torchrun, mpirun or srun.
// netsum_config_free() frees them.
//
// The caller promises:
// `config` points to room for a pointer.
netsum_status netsum_config_new(netsum_config **config);

// Replaces one setting: "rank" is NETSUM_RANK in the environment, and so on.
//
// The caller promises:
// `config` comes from netsum_config_new(); the texts end with a null byte.
netsum_status netsum_config_set(netsum_config *config, const char *name, const char *value);

// Frees settings; does nothing for NULL.
//
// The caller promises:
// `config` comes from netsum_config_new(), and is not used afterwards.
void netsum_config_free(netsum_config *config);

// Writes the header with which a message begins, if its job was created with `--in-band`. The box
// sums the header, too. It needs no communicator.
//
// The caller promises:
// `message` points to one whose token ends with a null byte; `header` points to room for
// NETSUM_JOB_HEADER_SIZE bytes.
netsum_status netsum_job_header(const netsum_message *message, uint8_t *header);

// The text of this thread's last error: what is wrong, and what to do. It is valid until the
// thread's next error.
const char *netsum_error_text(void);

// The rank that this thread's last error is about, or -1.
int32_t netsum_error_rank(void);

// Sets `done` to whether netsum_wait() would return at once. Never blocks.
//
// The caller promises:
// `work` comes from an operation, and `done` points to room.
netsum_status netsum_test(const netsum_work *work, bool *done);

// Waits for at most `seconds`, and no longer than a day, and sets `done` to whether
// netsum_wait() would return at once.
//
// The caller promises:
// `work` comes from an operation, and `done` points to room.
netsum_status netsum_wait_for(const netsum_work *work, double seconds, bool *done);

// Waits for an operation, frees its handle, and writes its result to `report`, unless that is
// NULL. Afterwards the memory belongs to the caller, whatever is returned.
//
// The caller promises:
// `work` comes from an operation, and is not used afterwards; `report` is NULL or points to room.
netsum_status netsum_wait(netsum_work *work, netsum_report *report);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* NETSUM_H */
