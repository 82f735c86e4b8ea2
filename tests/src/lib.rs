//! A lab of network namespaces.
