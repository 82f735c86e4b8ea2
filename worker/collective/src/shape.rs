//! Job properties that all ranks must agree on.

use std::ops::RangeInclusive;
use std::time::Duration;

use netsum_common::limits::{MIN_MTU, MTU_STEP};

use crate::numeric::layout::{CHECK_BYTES, Layout};
use crate::seal::TAG_BYTES;

/// The largest window.
pub const MAX_WINDOW: u32 = 1024;

/// Path MTUs, all multiples of [`MTU_STEP`]. A box takes up to half of the largest.
const MTUS: RangeInclusive<u32> = MIN_MTU..=4096;

/// Bytes of the smallest message: check lanes and an element.
const LEAST_MESSAGE: u32 = CHECK_BYTES as u32 + 4;

/// Job properties that all ranks must agree on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct JobShape {
    pub ranks: u32,
    pub mtu: u32,
    pub layout: Layout,
    /// The box releases sums in any order, and ranks send again only what is missing.
    pub relaxed: bool,
    /// There is no box: the hosts' ring sums from the start.
    pub on_host_ring: bool,
    /// Messages are [sealed](crate::seal). The layout is without their tags.
    pub is_sealed: bool,
}

impl JobShape {
    /// Properties that must be the same at all ranks, under the names that users know.
    pub(crate) fn named(&self, timeout: Duration) -> [(&'static str, String); 9] {
        let Layout { window, rings, .. } = self.layout;
        let order = if self.relaxed { "relaxed" } else { "in-order" };
        let summer = if self.on_host_ring { "the ranks" } else { "a box" };
        let secret = if self.is_sealed { "set" } else { "not set" };
        [
            ("ranks (NETSUM_RANKS)", self.ranks.to_string()),
            ("mtu (NETSUM_MTU)", self.mtu.to_string()),
            ("message_size (NETSUM_MESSAGE_SIZE)", self.message_room().to_string()),
            ("window (NETSUM_WINDOW)", window.to_string()),
            ("rings (NETSUM_RINGS)", rings.to_string()),
            ("the order", order.to_owned()),
            ("who sums", summer.to_owned()),
            ("secret (NETSUM_SECRET)", secret.to_owned()),
            ("timeout (NETSUM_TIMEOUT)", format!("{timeout:?}")),
        ]
    }

    /// The same with sealed messages of the same size.
    pub fn sealed(self) -> Self {
        let message_size = self.layout.message_size.saturating_sub(TAG_BYTES as u32);
        Self { layout: Layout { message_size, ..self.layout }, is_sealed: true, ..self }
    }

    /// Bytes of the longest message, with its tag.
    pub fn message_room(&self) -> usize {
        self.layout.message_size as usize + if self.is_sealed { TAG_BYTES } else { 0 }
    }

    /// Refuses properties that cannot work, from a controller or from settings.
    pub fn check(&self) -> Result<(), String> {
        let Layout { message_size, window, rings } = self.layout;
        if !(1..=64).contains(&self.ranks) {
            return Err(format!("ranks {}: 1 to 64", self.ranks));
        }
        if !MTUS.contains(&self.mtu) || !self.mtu.is_multiple_of(MTU_STEP) {
            let (least, most) = MTUS.into_inner();
            return Err(format!("mtu {}: a multiple of {MTU_STEP}, {least} to {most}", self.mtu));
        }
        if message_size % 4 != 0 || !(LEAST_MESSAGE..=1 << 24).contains(&message_size) {
            return Err(format!(
                "message_size {message_size}: a multiple of 4 from {LEAST_MESSAGE} to 16777216"
            ));
        }
        if !(1..=MAX_WINDOW).contains(&window) {
            return Err(format!("window {window}: 1 to {MAX_WINDOW}"));
        }
        if !(1..=255).contains(&rings) {
            return Err(format!("rings {rings}: 1 to 255"));
        }
        Ok(())
    }
}
