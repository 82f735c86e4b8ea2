//! Messages between ranks: frames of a neighbour, or of somebody in its place, on a bypass
//! connection.
//!
//! Any bytes are read without a panic, and a frame that was read is written as it was. Of sealed
//! messages, those that a forger leaves as they are arrive in order, and all others are refused.

use arbitrary::{Result, Unstructured};
use netsum_collective::buffer::Buffer;
use netsum_collective::frame::{Frame, VERSION};
use netsum_collective::seal::{Exchange, GroupKey, Seal, Secret, Share};
use zeroize::Zeroizing;

pub fn run(input: &[u8]) {
    read(input);
    if let Some(frame) = with_kind(input) {
        read(&frame);
    }
    let _ = forge(&mut Unstructured::new(input));
}

/// The input as a frame of a kind that there is, half of the greetings with the right version.
fn with_kind(input: &[u8]) -> Option<Vec<u8>> {
    let (choice, rest) = input.split_first()?;
    let mut frame = u32::from(1 + choice % 14).to_le_bytes().to_vec();
    if choice % 14 == 0 && choice & 64 == 0 {
        frame.extend(VERSION.to_le_bytes());
    }
    frame.extend(rest);
    Some(frame)
}

fn read(input: &[u8]) {
    let again = |frame: &Frame| {
        let mut written = Buffer::from(Vec::new());
        frame.encode_to(&mut written);
        Frame::decode(&written)
    };
    let Some(frame) = Frame::decode(input) else { return };
    let read = again(&frame).unwrap_or_else(|| panic!("{frame:?} cannot be read"));
    // A text is cut to the bytes that a frame has room for.
    if !matches!(frame, Frame::Failure { .. }) {
        assert_eq!(read, frame);
    }
    assert_eq!(again(&read), Some(read));
}

fn seal(rank: u32) -> Seal {
    let secret = Secret::new("a secret of the ranks").expect("long enough");
    let share = Share::new(secret, &["job"], &Zeroizing::new([7; 64]));
    let exchange = Exchange::new(share, b"a job", rank);
    exchange.seal(&[[1; 32], [2; 32]], &GroupKey::new([3; 32]), (1, 64))
}

fn forge(u: &mut Unstructured) -> Result<()> {
    let (mut sender, mut receiver) = (seal(0), seal(1));
    while !u.is_empty() {
        let message: Vec<u8> = u.arbitrary()?;
        let mut sealed = Buffer::from(message.clone());
        sender.close_bypass(&mut sealed);
        let mut arrives = sealed.to_vec();
        for _ in 0..u.int_in_range(0..=3)? {
            match u.int_in_range(0..=2)? {
                0 => arrives.truncate(u.arbitrary_len::<u8>()?),
                1 => arrives.extend(u.arbitrary::<[u8; 3]>()?),
                _ => {
                    let at = u.choose_index(arrives.len().max(1))?;
                    arrives.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 0x10);
                }
            }
        }
        let is_whole = arrives == *sealed;
        let mut opened = Buffer::from(arrives);
        assert_eq!(receiver.open_bypass(&mut opened).is_ok(), is_whole, "{message:?}");
        if !is_whole {
            return Ok(());
        }
        assert_eq!(*opened, *message);
    }
    Ok(())
}
