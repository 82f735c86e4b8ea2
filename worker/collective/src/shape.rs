//! Job properties that all ranks must agree on.

use crate::numeric::layout::{CHECK_BYTES, Layout};

/// The largest window that there can be.
pub const MAX_WINDOW: u32 = 1024;

/// Bytes of the least message that there can be: check lanes and an element.
const LEAST_MESSAGE: u32 = CHECK_BYTES as u32 + 4;

/// Job properties that all ranks must agree on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct JobShape {
    pub ranks: u32,
    pub mtu: u32,
    pub layout: Layout,
    /// The box releases sums in any order, and ranks send again only what is missing.
    pub relaxed: bool,
    /// There is no box: the ranks sum by themselves from the start.
    pub without_box: bool,
}

impl JobShape {
    /// Finds properties that cannot work, whoever gave them.
    pub fn check(&self) -> Result<(), String> {
        let Layout { message_size, window, rings } = self.layout;
        if !(1..=64).contains(&self.ranks) {
            return Err(format!("ranks {}: 1 to 64", self.ranks));
        }
        if ![256, 512, 1024, 2048, 4096].contains(&self.mtu) {
            return Err(format!("mtu {}: 256, 512, 1024, 2048 or 4096", self.mtu));
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
