//! `netsum-perf` measures how fast collectives are, and prints the table of nccl-tests.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`args`] | the command line |
//! | [`command`] | the commands, with nccl-tests' names and factors |
//! | [`data`] | inputs that every rank can compute for all ranks, and the results |
//! | [`measure`] | the measuring loop |
//! | [`table`] | rows, as text or JSON |

mod args;
mod command;
mod data;
mod measure;
mod table;

use std::process::ExitCode;

use anyhow::Result;
use netsum_worker::Dtype;
use netsum_worker::half::{bf16, f16};

use args::Options;
use command::Collective;

/// The element types: the library's, Rust's, and nccl-tests' name.
macro_rules! types {
    ($($dtype:ident, $type:ty, $nccl:literal;)*) => {
        const TYPES: &[Dtype] = &[$(Dtype::$dtype),*];

        /// The type's name in tables.
        fn nccl_name(dtype: Dtype) -> &'static str {
            match dtype {
                $(Dtype::$dtype => $nccl,)*
            }
        }

        fn run(collective: &'static Collective, options: &Options) -> Result<u64> {
            match options.dtype {
                $(Dtype::$dtype => measure::run::<$type>(collective, options),)*
            }
        }
    };
}

types! {
    I8, i8, "int8";
    U8, u8, "uint8";
    I16, i16, "int16";
    U16, u16, "uint16";
    I32, i32, "int32";
    U32, u32, "uint32";
    I64, i64, "int64";
    U64, u64, "uint64";
    F16, f16, "half";
    Bf16, bf16, "bfloat16";
    F32, f32, "float";
    F64, f64, "double";
    Bool, bool, "bool";
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let (collective, options) = args::parse(std::env::args_os()).unwrap_or_else(|e| e.exit());
    let rank = options.rank;
    match run(collective, &options) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(wrong) => {
            eprintln!("netsum-perf: rank {rank}: {wrong} wrong elements");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("netsum-perf: rank {rank}: {error:#}");
            ExitCode::FAILURE
        }
    }
}
