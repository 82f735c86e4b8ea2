//! A target under libFuzzer, chosen by the variable `NETSUM_FUZZ_TARGET`; see `cargo xtask fuzz`.
#![no_main]

use std::cell::RefCell;

use netsum_fuzz::{Run, target};

thread_local! {
    static RUN: RefCell<Run> = RefCell::new({
        let name = std::env::var("NETSUM_FUZZ_TARGET").expect("NETSUM_FUZZ_TARGET");
        let target = target(&name).expect("a target's name in NETSUM_FUZZ_TARGET");
        (target.start)().unwrap_or_else(|e| panic!("{name}: {e:?}"))
    });
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| RUN.with_borrow_mut(|run| run(data)));
