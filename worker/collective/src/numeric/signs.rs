//! Which lanes of a message are signed, which the tags of sealed sums depend on.

/// How lanes are integers whose sum over all ranks is one, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signs {
    Signed,
    Unsigned,
    /// Of each `of` lanes the one at `place` is signed.
    One {
        place: usize,
        of: usize,
    },
}
