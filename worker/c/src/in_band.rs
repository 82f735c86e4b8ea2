//! The header of an application that sends messages of its own, and is set up in band.

use std::ffi::c_char;

use netsum_common::wire::in_band::{DTYPE_I32, JOB_HEADER_LEN};
use netsum_common::wire::{InBandToken, JobHeader};
use netsum_worker::Error;

use crate::status::{netsum_status, null, status, text};

/// Bytes of the header that netsum_job_header() writes.
pub const NETSUM_JOB_HEADER_SIZE: usize = 48;

const _: () = assert!(NETSUM_JOB_HEADER_SIZE == JOB_HEADER_LEN);

/// A message that an application sends to the next rank of its ring, by itself.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netsum_message {
    /// The in-band token that `netsum job create --in-band` prints: 32 hexadecimal digits.
    token: *const c_char,
    /// The ring of the job, from 0.
    ring: u32,
    /// The sending rank, from 0.
    rank: u32,
    /// Ranks of the job.
    ranks: u32,
    /// Number of the message on its connection, from 0.
    number: u32,
    /// Packets of the message: its bytes, with the header, divided by the path MTU and rounded up.
    packets: u32,
    /// Packets of all messages before it on its connection.
    packets_before: u32,
}

/// Writes the header with which a message begins, if its job was created with `--in-band`. The box
/// sums the header, too. It needs no communicator.
///
/// # Safety
/// `message` points to one whose token ends with a null byte; `header` points to room for
/// NETSUM_JOB_HEADER_SIZE bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_job_header(
    message: *const netsum_message,
    header: *mut u8,
) -> netsum_status {
    versioned!("netsum_job_header");
    status(|| {
        // SAFETY: the caller's promise.
        let message = unsafe { message.as_ref() }.ok_or_else(|| null("message"))?;
        if header.is_null() {
            return Err(null("header"));
        }
        // SAFETY: the caller's promise.
        let token = parse(unsafe { text("token", message.token) }?)?;
        let bytes = JobHeader {
            dtype: DTYPE_I32,
            token,
            ring: message.ring,
            rank: message.rank,
            ranks: message.ranks,
            message: message.number,
            fragments: message.packets,
            index: message.packets_before & netsum_common::serial::MASK,
        }
        .encode();
        // SAFETY: the caller's promise.
        unsafe { header.cast::<[u8; JOB_HEADER_LEN]>().write_unaligned(bytes) };
        Ok(())
    })
}

fn parse(token: &str) -> Result<InBandToken, Error> {
    let is_hex = token.len() == 32 && token.bytes().all(|b| b.is_ascii_hexdigit());
    let number = u128::from_str_radix(token, 16).ok().filter(|_| is_hex);
    number.map(|number| InBandToken(number.to_be_bytes())).ok_or_else(|| {
        Error::Argument("token is not the in-band token, of 32 hexadecimal digits".into())
    })
}
