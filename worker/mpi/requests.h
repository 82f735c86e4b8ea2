// Operations in flight.

#pragma once

#include "call.h"

struct op;

// What netsum knows of an MPI communicator, or of a persistent request.
struct group {
    // NULL: its collectives are MPI's own.
    netsum_comm *net;
    // Joining was tried, or is pointless.
    bool tried;
    // A nonblocking call would have used it, but only blocking ones can join.
    bool wanted;
    // For persistent requests, one at a time; and whether there is none.
    bool persistent, idle;
    // It leaves netsum once nothing is in flight.
    bool leaving;
    // `own`, once MPI has freed the communicator.
    MPI_Comm comm;
    // The same ranks, for operations that netsum refuses after their start: infinities, NaNs.
    MPI_Comm own;
    // Operations in flight in the order of their calls, and the first that has not been started.
    struct op *first, *last, *waiting;
    int operations;
    // A thread starts those that wait.
    bool starting;
    // MPI's requests that exist.
    int requests;
    struct group *next;
};

void netsum_mpi_begin(void);
// Runs a call to its end, or starts it, or makes a request that can be started.
int netsum_mpi_run(struct group *group, const struct call *call);
int netsum_mpi_start(struct group *group, const struct call *call, MPI_Request *request);
int netsum_mpi_persist(struct group *group, const struct call *call, MPI_Request *request);
// Completes what is complete. Returns whether any operation is in flight.
bool netsum_mpi_progress(void);
// Waits a little for the oldest operation.
void netsum_mpi_doze(void);
// The error of a call by this thread that has completed requests.
int netsum_mpi_outcome(int error);
// Makes a group, which has not joined.
struct group *netsum_mpi_add(MPI_Comm comm);
// MPI frees the communicator: its groups leave once nothing is in flight.
void netsum_mpi_freed(MPI_Comm comm);
// The group's persistent request is freed.
void netsum_mpi_idle(struct group *group);
// The communicator's group for persistent requests with this number, the same at all ranks.
struct group *netsum_mpi_persistent(MPI_Comm comm, int number);
// All groups leave.
void netsum_mpi_leave(void);
