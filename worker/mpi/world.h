// Which communicators have joined netsum.

#pragma once

#include "requests.h"

enum form { BLOCKING, NONBLOCKING, PERSISTENT };

// The group for a call if it is worth one and the communicator's ranks have joined. In a blocking
// call they join now if a call has wanted that. A persistent call gets a group of its own.
struct group *netsum_mpi_group(MPI_Comm comm, enum form form, bool worth);
// NETSUM_MPI_MIN_BYTES, or -1.
long long netsum_mpi_min_bytes(void);
