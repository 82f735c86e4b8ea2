//! The XDP programs against their model; see `netsum_lab::differential`. Needs root and BPF.

use netsum_lab::differential::Differential;

use crate::Run;

/// Loads the programs.
///
/// # Errors
/// Without root, or where the kernel does not take them.
pub fn start() -> anyhow::Result<Run> {
    let mut both = Differential::new()?;
    Ok(Box::new(move |input| {
        if let Err(e) = both.run(input) {
            panic!("{e:?}");
        }
    }))
}
