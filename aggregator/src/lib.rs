//! The daemon of the box: everything but the argument parsing of `netsum`, so that tests can use it too.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`dataplane`] | loading, attaching and feeding the XDP programs |

pub mod dataplane;
