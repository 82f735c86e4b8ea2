//! Shows `netsum top`'s screen, and panics when a key is pressed: in the thread that draws, or with
//! the argument `thread` in another one.

use std::io::Read as _;

use netsum_cli::top::Screen;
use netsum_cli::top::model::Model;

fn main() {
    let elsewhere = std::env::args().nth(1).is_some_and(|a| a == "thread");
    let mut screen = Screen::take().expect("a terminal");
    screen.draw(&Model::default()).expect("a terminal to draw on");
    let wait_and_panic = || {
        let _ = std::io::stdin().read(&mut [0]);
        panic!("on purpose");
    };
    if elsewhere {
        let _ = std::thread::spawn(wait_and_panic).join();
        // As if the thread that queries the daemon had ended.
        drop(screen);
        std::process::exit(101);
    }
    wait_and_panic();
}
