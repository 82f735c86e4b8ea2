//! A job of a lab.

use std::time::Duration;

use netsum_collective::seal::TAG_BYTES;
use netsum_worker::Layout;

#[derive(Clone, Debug)]
pub struct JobSpec {
    pub name: String,
    pub ranks: u32,
    /// Path MTU in bytes; 0: the default.
    pub mtu: u32,
    /// Message size in bytes.
    pub message_size: u32,
    /// Window in messages.
    pub window: u32,
    pub rings: u32,
    /// `--order`.
    pub order: &'static str,
    /// Silence after which a rank is considered dead.
    pub timeout: Duration,
    /// How long ranks wait for each other when they connect.
    pub connect_timeout: Duration,
    /// Retry settings of ranks with an RDMA adapter; see `netsum_worker::AdapterRetry`.
    pub retry: (u8, u8),
    /// Ranks that must send and receive over AF_XDP.
    pub xdp: Vec<u32>,
    /// Ranks begin even if no box of a fabric can sum.
    pub host_ring_fallback: bool,
    /// `hierarchy` of the ranks' settings.
    pub hierarchy: &'static str,
    /// `secret` of the ranks' settings; empty for none.
    pub secret: &'static str,
}

impl JobSpec {
    /// A job of `ranks` ranks, and defaults for the rest.
    pub fn new(name: &str, ranks: u32) -> Self {
        Self {
            name: name.to_owned(),
            ranks,
            mtu: 1024,
            message_size: 16384,
            window: 8,
            rings: 1,
            order: "auto",
            timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(20),
            retry: (17, 7),
            xdp: Vec::new(),
            host_ring_fallback: false,
            hierarchy: "auto",
            secret: "",
        }
    }

    /// Arguments of `netsum` that create the job.
    pub fn create_arguments(&self) -> Vec<String> {
        let Self { name, ranks, mtu, message_size, window, rings, order, .. } = self;
        let options = [
            ("--ranks", ranks.to_string()),
            ("--message-size", message_size.to_string()),
            ("--window", window.to_string()),
            ("--rings", rings.to_string()),
            ("--order", (*order).to_owned()),
        ];
        let words = ["job", "create", name].map(str::to_owned).into_iter();
        let words =
            words.chain(options.into_iter().flat_map(|(option, value)| [option.to_owned(), value]));
        let mtu = (*mtu != 0).then(|| ["--mtu".to_owned(), mtu.to_string()]);
        let words = words.chain(mtu.into_iter().flatten());
        words.chain(self.host_ring_fallback.then(|| "--host-ring-fallback".to_owned())).collect()
    }

    /// The job's layout, as the library has it.
    pub fn layout(&self) -> Layout {
        let tag = if self.secret.is_empty() { 0 } else { TAG_BYTES as u32 };
        let Self { message_size, window, rings, .. } = *self;
        Layout { message_size: message_size - tag, window, rings }
    }
}
