//! C programs, compiled with the machine's compiler and run as two ranks on loopback.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

mod library;

/// Compiles a program against the header and the library.
fn compile(source: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = library::path();
    let name = Path::new(source).file_stem().unwrap();
    let room = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    drop(std::fs::remove_dir_all(&room));
    std::fs::create_dir_all(&room).unwrap();
    // By the name that programs look for.
    std::os::unix::fs::symlink(&library, room.join("libnetsum.so.1")).unwrap();
    let program = room.join(name);
    let out = Command::new("cc")
        .args(["-std=c11", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Werror", "-pthread"])
        .arg(folder.join(source))
        .arg(format!("-I{}", folder.join("include").display()))
        .arg(&library)
        .arg(format!("-Wl,-rpath,{}", room.display()))
        .arg("-o")
        .arg(&program)
        .output()
        .expect("a C compiler");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    program
}

/// Runs two ranks, and returns what each printed.
fn run(program: &Path, network: u32) -> [String; 2] {
    let id = std::process::id() * 2 + network;
    let peers =
        [1, 2].map(|rank| format!("127.{}.{}.{rank}", 128 + id % 64, id / 64 % 256)).join(",");
    let start = |rank: usize| -> Child {
        let mut command = Command::new(program);
        for (name, value) in
            [("RANK", &*rank.to_string()), ("WORLD_SIZE", "2"), ("NETSUM_PEERS", &*peers)]
        {
            command.env(name, value);
        }
        // Cargo's path would come first, where an older library may be.
        command.env_remove("LD_LIBRARY_PATH");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let outputs = [0, 1].map(start).map(|rank| rank.wait_with_output().unwrap());
    outputs.map(|out| {
        assert!(out.status.success(), "{}: {}", out.status, String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    })
}

#[test]
fn the_example_sums() {
    let printed = run(&compile("examples/all_reduce.c"), 0);
    for (rank, printed) in printed.iter().enumerate() {
        assert!(
            printed.contains(&format!("rank {rank} has 2 everywhere, summed by the ring")),
            "{printed}"
        );
    }
}

#[test]
fn calls_do_what_the_header_says() {
    run(&compile("tests/calls.c"), 1);
}
