//! A target under libFuzzer, chosen by the variable `NETSUM_FUZZ_TARGET`; see `cargo xtask fuzz`.
#![no_main]

use std::cell::RefCell;

use netsum_fuzz::Run;

thread_local! {
    static RUN: RefCell<Run> = RefCell::new({
        let name = std::env::var("NETSUM_FUZZ_TARGET").expect("NETSUM_FUZZ_TARGET");
        netsum_fuzz::start(&name).unwrap_or_else(|e| panic!("{name}: {e:?}"))
    });
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| RUN.with_borrow_mut(|run| run(data)));
