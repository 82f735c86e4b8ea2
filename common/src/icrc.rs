//! The invariant CRC of RoCEv2: CRC-32 (IEEE 802.3) over eight bytes of ones, the IP, UDP and
//! transport headers with the fields that routers may change set to ones, and the payload; stored
//! little endian (IBTA annex A17.3.3).
//!
//! All functions work on the *state*: the CRC register of the reflected algorithm, not
//! complemented. The ICRC on the wire is `!state`. States are linear over GF(2), which is what
//! [`shift`] and [`patch`] rest on.
//!
//! There are three ways to process a payload. [`lanes`](step4) and words use tables, 8 bytes in
//! eight look-ups. Payloads of at least one cell use [`Chorba`], which needs no table (arXiv
//! 2412.16398) and is 2.7 times as fast in BPF; long ones use [`Lagged`], which needs no shifts
//! either.

use crate::wire::{BTH_LEN, Bytes, Header, Ipv4Hdr, Ipv6Hdr, L3, UdpHdr};

/// CRC-32 polynomial, reflected.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// State after the eight bytes of ones that stand for the link header.
pub const SEED: u32 = 0xdebb_20e3;

/// Longest length that [`shift`] takes: its bits 2 to 11 are used.
pub const MAX_SHIFT: usize = 4095;

/// `TABLE[j][b]`: state after byte `b` and `j` zero bytes, from state 0.
static TABLE: [[u32; 256]; 8] = table();

/// `SHIFT[i][j][b]`: state `b << 8j` after `4 << i` zero bytes.
static SHIFT: [[[u32; 256]; 4]; 10] = shift_tables();

/// `UNSHIFT[j][b]`: the state that 40 zero bytes turn into `b << 8j`.
static UNSHIFT: [[u32; 256]; 4] = unshift_tables();

const fn unshift_tables() -> [[u32; 256]; 4] {
    let mut t = [[0; 256]; 4];
    let mut j = 0;
    while j < 4 {
        let mut b = 0;
        while b < 256 {
            let mut s = (b as u32) << (8 * j);
            let mut bit = 0;
            while bit < 8 * CARRY_WORDS * 8 {
                // A step is s >> 1, and the polynomial, whose top bit is set, when a one fell out.
                s = if s >> 31 != 0 { (s ^ POLYNOMIAL) << 1 | 1 } else { s << 1 };
                bit += 1;
            }
            t[j][b] = s;
            b += 1;
        }
        j += 1;
    }
    t
}

const fn table() -> [[u32; 256]; 8] {
    let mut t = [[0; 256]; 8];
    let mut i = 0;
    while i < 256 {
        let mut c = i as u32;
        let mut bit = 0;
        while bit < 8 {
            c = if c & 1 != 0 { POLYNOMIAL ^ c >> 1 } else { c >> 1 };
            bit += 1;
        }
        t[0][i] = c;
        i += 1;
    }
    let mut j = 1;
    while j < 8 {
        let mut i = 0;
        while i < 256 {
            t[j][i] = t[j - 1][i] >> 8 ^ t[0][(t[j - 1][i] & 0xff) as usize];
            i += 1;
        }
        j += 1;
    }
    t
}

const fn apply(operator: &[[u32; 256]; 4], s: u32) -> u32 {
    operator[0][(s & 0xff) as usize]
        ^ operator[1][(s >> 8 & 0xff) as usize]
        ^ operator[2][(s >> 16 & 0xff) as usize]
        ^ operator[3][(s >> 24) as usize]
}

const fn shift_tables() -> [[[u32; 256]; 4]; 10] {
    let t = table();
    let mut s = [[[0; 256]; 4]; 10];
    // Four zero bytes: the state's bytes are consumed as if they were data.
    let mut j = 0;
    while j < 4 {
        s[0][j] = t[3 - j];
        j += 1;
    }
    let mut i = 1;
    while i < 10 {
        let mut j = 0;
        while j < 4 {
            let mut b = 0;
            while b < 256 {
                s[i][j][b] = apply(&s[i - 1], s[i - 1][j][b]);
                b += 1;
            }
            j += 1;
        }
        i += 1;
    }
    s
}

/// State after one byte.
#[inline(always)]
pub fn step1(state: u32, byte: u8) -> u32 {
    state >> 8 ^ TABLE[0][((state ^ byte as u32) & 0xff) as usize]
}

/// State after four bytes, given as a little-endian word.
#[inline(always)]
pub fn step4(state: u32, word: u32) -> u32 {
    let x = state ^ word;
    TABLE[3][(x & 0xff) as usize]
        ^ TABLE[2][(x >> 8 & 0xff) as usize]
        ^ TABLE[1][(x >> 16 & 0xff) as usize]
        ^ TABLE[0][(x >> 24) as usize]
}

/// State after eight bytes, given as a little-endian word (slicing by 8).
#[inline(always)]
pub fn step8(state: u32, word: u64) -> u32 {
    let x = word ^ state as u64;
    TABLE[7][(x & 0xff) as usize]
        ^ TABLE[6][(x >> 8 & 0xff) as usize]
        ^ TABLE[5][(x >> 16 & 0xff) as usize]
        ^ TABLE[4][(x >> 24 & 0xff) as usize]
        ^ TABLE[3][(x >> 32 & 0xff) as usize]
        ^ TABLE[2][(x >> 40 & 0xff) as usize]
        ^ TABLE[1][(x >> 48 & 0xff) as usize]
        ^ TABLE[0][(x >> 56) as usize]
}

/// State after a fixed number of bytes.
#[inline(always)]
pub fn update_array<const N: usize>(mut state: u32, bytes: &[u8; N]) -> u32 {
    let mut i = 0;
    while i + 8 <= N {
        let w = [
            bytes[i],
            bytes[i + 1],
            bytes[i + 2],
            bytes[i + 3],
            bytes[i + 4],
            bytes[i + 5],
            bytes[i + 6],
            bytes[i + 7],
        ];
        state = step8(state, u64::from_le_bytes(w));
        i += 8;
    }
    if i + 4 <= N {
        state =
            step4(state, u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]));
        i += 4;
    }
    while i < N {
        state = step1(state, bytes[i]);
        i += 1;
    }
    state
}

/// State after any number of bytes; for headers and tests. Long payloads in user space go through
/// `crc32fast`.
pub fn update(mut state: u32, bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks::<8>();
    for w in words {
        state = step8(state, u64::from_le_bytes(*w));
    }
    for &b in rest {
        state = step1(state, b);
    }
    state
}

/// State after `len` zero bytes; `len` is a multiple of 4 and at most [`MAX_SHIFT`]. One operator
/// of four look-ups for each bit that is set, so a single one for the usual path MTUs.
#[inline(always)]
pub fn shift(mut state: u32, len: usize) -> u32 {
    let mut i = 0;
    while i < SHIFT.len() {
        if len & 4 << i != 0 {
            state = apply(&SHIFT[i], state);
        }
        i += 1;
    }
    state
}

/// The ICRC after a four-byte word (as stored, little endian) `after` bytes before the ICRC has
/// changed.
#[inline(always)]
pub fn patch(icrc: u32, old: u32, new: u32, after: usize) -> u32 {
    icrc ^ shift(step4(0, old ^ new), after)
}

/// State after the headers of a packet whose IP header starts at `ip`: seed, masked IP, UDP and
/// base transport header, and `extended_len` bytes (a multiple of 4, at most 20) of RETH and
/// immediate data.
#[inline(always)]
pub fn headers<B: Bytes + ?Sized>(b: &B, l3: L3, ip: usize, extended_len: usize) -> Option<u32> {
    let mut state = SEED;
    match l3 {
        L3::V4 => {
            let mut h = Ipv4Hdr::load(b, ip)?;
            (h.tos, h.ttl, h.check) = (0xff, 0xff, [0xff; 2]);
            state = update_array(state, &h.bytes());
        }
        L3::V6 => {
            let mut h = Ipv6Hdr::load(b, ip)?;
            // Traffic class and flow label; the version stays.
            (h.vcf, h.hop_limit) = ([h.vcf[0] | 0x0f, 0xff, 0xff, 0xff], 0xff);
            state = update_array(state, &h.bytes());
        }
    }
    let udp_at = ip + l3.header_len();
    let mut udp = UdpHdr::load(b, udp_at)?;
    udp.check = [0xff; 2];
    state = update_array(state, &udp.bytes());
    let mut bth = b.load::<BTH_LEN>(udp_at + UdpHdr::LEN)?;
    bth[4] = 0xff; // FECN, BECN and reserved bits
    state = update_array(state, &bth);
    let mut at = udp_at + UdpHdr::LEN + BTH_LEN;
    let mut left = extended_len / 4;
    while left > 0 && left <= 5 {
        state = step4(state, u32::from_le_bytes(b.load::<4>(at)?));
        at += 4;
        left -= 1;
    }
    Some(state)
}

/// Masks for the five little-endian words of an IPv4, UDP and base transport header: the bits that
/// count as ones, as [`headers`] sets them.
pub const HEADER_MASK_V4: [u64; 5] = {
    let mut bytes = [[0u8; 8]; 5];
    bytes[0][1] = 0xff; // type of service
    bytes[1][0] = 0xff; // time to live
    bytes[1][2] = 0xff; // IPv4 checksum
    bytes[1][3] = 0xff;
    bytes[3][2] = 0xff; // UDP checksum
    bytes[3][3] = 0xff;
    bytes[4][0] = 0xff; // FECN, BECN and reserved bits
    let mut words = [0; 5];
    let mut i = 0;
    while i < 5 {
        words[i] = u64::from_le_bytes(bytes[i]);
        i += 1;
    }
    words
};

/// The ICRC that a whole frame should carry, for a payload (with pad) of `len` bytes behind
/// `payload_at`. `None` where the frame is too short.
pub fn of_frame(frame: &[u8], l3: L3, ip: usize, payload_at: usize, len: usize) -> Option<u32> {
    let bth_end = ip + l3.header_len() + UdpHdr::LEN + BTH_LEN;
    let state = headers(frame, l3, ip, 0)?;
    Some(!update(state, frame.get(bth_end..payload_at + len)?))
}

/// Words that [`Chorba`] has pending.
const CARRY_WORDS: usize = 5;

/// Number of 64-bit words in one cell of payload.
pub const CELL_WORDS: usize = crate::abi::CELL_LEN / 8;
const _: () = assert!(CELL_WORDS == 32);

/// Takes in the words with the given numbers. Not a loop: moving the carries would cost as much as
/// using them, and the compiler does not unroll this far by itself.
macro_rules! unrolled {
    ($chorba:ident, $word:ident, $($i:literal)+) => { $($chorba.word($word($i));)+ };
}

/// CRC of a payload without tables, a cell of 256 bytes at a time.
///
/// The polynomial has the sparse multiple x^300 + x^211 + x^183 + x^145 + 1 (Chorba, arXiv
/// 2412.16398, section 4): a 64-bit word can be removed from the front of the stream by XORing it
/// in again 145, 183, 211 and 300 bits later. The carry holds what is pending for the next five
/// words.
#[derive(Clone, Copy)]
pub struct Chorba {
    carry: [u64; CARRY_WORDS],
}

impl Chorba {
    /// Starts in a state, for instance that after the headers, or 0 for the payload's own linear
    /// part.
    #[inline(always)]
    pub fn new(state: u32) -> Self {
        Self { carry: [state as u64, 0, 0, 0, 0] }
    }

    /// Takes in word `w` and makes room for the next.
    #[inline(always)]
    pub fn word(&mut self, w: u64) {
        let [c0, c1, c2, c3, c4] = self.carry;
        let v = w ^ c0;
        self.carry = [
            c1,
            c2 ^ v << 17 ^ v << 55,
            c3 ^ v >> 47 ^ v >> 9 ^ v << 19,
            c4 ^ v >> 45 ^ v << 44,
            v >> 20,
        ];
    }

    /// Takes in a cell; `word(i)` gives its i-th little-endian word.
    #[inline(always)]
    pub fn cell(&mut self, word: impl Fn(usize) -> u64) {
        unrolled!(self, word, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
        unrolled!(self, word, 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);
    }

    /// The state after all words. The pending bits are in the five words behind the end: these go
    /// through tables, and the five words by which the result is too late are undone.
    #[inline(always)]
    pub fn state(self) -> u32 {
        let mut state = 0;
        let mut i = 0;
        while i < CARRY_WORDS {
            state = step8(state, self.carry[i]);
            i += 1;
        }
        apply(&UNSHIFT, state)
    }
}

/// How far back [`Lagged`] looks, in bytes.
const LAGS: [usize; 4] = [145, 183, 211, 300];
/// Words that [`Lagged`] has pending.
const PENDING_WORDS: usize = LAGS[3].div_ceil(8);

/// CRC of a long payload, with neither tables nor shifts.
///
/// Squaring is linear over GF(2), so the eighth power of [`Chorba`]'s multiple has as few terms:
/// x^2400 + x^1688 + x^1464 + x^1160 + 1. Its distances are whole bytes. A word that is removed
/// from the front of the stream returns 145, 183, 211 and 300 *bytes* later, which takes a load
/// from an odd address and no shift: ten instructions for a word instead of twenty-six. Removed
/// words are stored, and later words read them. The last 38 words go through [`Chorba`], so
/// [`Lagged`] pays off from three cells on.
#[repr(C, align(8))]
pub struct Lagged {
    /// Never written: zeros before the stream.
    zeros: [u64; PENDING_WORDS],
    removed: [u64; REMOVED_WORDS],
}

/// Words before the payload: a place for headers.
const HEADER_WORDS: usize = HEADER_MASK_V4.len();

/// Headers, and as many cells behind groups of less than a cell as the longest payload has: more
/// than there can be, but so the verifier counts.
const REMOVED_WORDS: usize = HEADER_WORDS + CELL_WORDS + crate::abi::MAX_MTU / 8;

impl Lagged {
    /// Room for a longest payload, and headers before it.
    pub const NEW: Self = Self { zeros: [0; PENDING_WORDS], removed: [0; REMOVED_WORDS] };
    /// Where the first header word is, in bytes from the start.
    const HEADERS: usize = 8 * PENDING_WORDS;
    /// Where the payload is.
    const PAYLOAD: usize = Self::HEADERS + 8 * HEADER_WORDS;

    /// Begins with headers, a word each, already with ones where they may change, and in a state.
    /// No header is as far as the least distance from the first.
    ///
    /// # Safety
    /// `this` must be valid, and nobody else's.
    #[inline(always)]
    pub unsafe fn headers(this: *mut Self, state: u32, word: impl Fn(usize) -> u64) {
        const { assert!(8 * HEADER_WORDS < LAGS[0]) };
        let mut first = state as u64;
        let mut i = 0;
        while i < HEADER_WORDS {
            // SAFETY: the caller's promise; `i` is below the number of header words.
            unsafe { (this as *mut u64).add(PENDING_WORDS + i).write(word(i) ^ first) };
            first = 0;
            i += 1;
        }
    }

    /// Takes in the 64 bytes of the payload from offset `at` on; `word(i)` gives their i-th
    /// little-endian word.
    ///
    /// # Safety
    /// `this` must be valid, and nobody else's; the payload must be at most `MAX_MTU` long.
    #[inline(always)]
    pub unsafe fn group(this: *mut Self, at: usize, word: impl Fn(usize) -> u64) {
        let at = this as usize + Self::PAYLOAD + at;
        macro_rules! words {
            ($($i:literal)+) => { $({
                // SAFETY: the caller's promise. The farthest distance is the zeros' length.
                unsafe { Self::remove::<{ 8 * $i }>(at, word($i)) };
            })+ };
        }
        words!(0 1 2 3 4 5 6 7);
    }

    /// The same for a cell.
    ///
    /// # Safety
    /// As for `group`.
    #[inline(always)]
    pub unsafe fn cell(this: *mut Self, at: usize, word: impl Fn(usize) -> u64) {
        macro_rules! groups {
            ($($g:literal)+) => { $({
                // SAFETY: the caller's promise.
                unsafe { Self::group(this, at + 64 * $g, |i| word(8 * $g + i)) };
            })+ };
        }
        groups!(0 1 2 3);
    }

    /// Removes the word at `at + OFFSET`, with what has come back there.
    ///
    /// # Safety
    /// `at + OFFSET` must be in `removed`, of a value that is nobody else's.
    #[inline(always)]
    unsafe fn remove<const OFFSET: usize>(at: usize, word: u64) {
        // SAFETY: the caller's promise; before `removed` there are as many zeros as the farthest
        // distance.
        unsafe {
            let word = word
                ^ ((at + OFFSET - LAGS[0]) as *const u64).read_unaligned()
                ^ ((at + OFFSET - LAGS[1]) as *const u64).read_unaligned()
                ^ ((at + OFFSET - LAGS[2]) as *const u64).read_unaligned()
                ^ ((at + OFFSET - LAGS[3]) as *const u64).read_unaligned();
            ((at + OFFSET) as *mut u64).write(word);
        }
    }

    /// Takes in the last two cells, from offset `at` on, and returns the state. The last words are
    /// not removed.
    ///
    /// # Safety
    /// As for `group`.
    #[inline(always)]
    pub unsafe fn last(this: *mut Self, at: usize, word: impl Fn(usize) -> u64) -> u32 {
        const { assert!(2 * CELL_WORDS - PENDING_WORDS == 26) };
        let at = this as usize + Self::PAYLOAD + at;
        let end = at + 8 * 26;
        let mut chorba = Chorba::new(0);
        macro_rules! remove {
            ($($i:literal)+) => { $({
                // SAFETY: as in `cell`.
                unsafe { Self::remove::<{ 8 * $i }>(at, word($i)) };
            })+ };
        }
        macro_rules! keep {
            ($($i:literal)+) => { $({
                let mut w = word(26 + $i);
                // SAFETY: the caller's promise; what begins behind the last removed word is left
                // out.
                unsafe {
                    if 8 * $i < LAGS[0] { w ^= ((end + 8 * $i - LAGS[0]) as *const u64).read_unaligned() }
                    if 8 * $i < LAGS[1] { w ^= ((end + 8 * $i - LAGS[1]) as *const u64).read_unaligned() }
                    if 8 * $i < LAGS[2] { w ^= ((end + 8 * $i - LAGS[2]) as *const u64).read_unaligned() }
                    w ^= ((end + 8 * $i - LAGS[3]) as *const u64).read_unaligned();
                }
                chorba.word(w);
            })+ };
        }
        remove!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25);
        // Reads beyond the last removed word must find zeros there.
        // SAFETY: the payload's buffer also has room for the words that are kept.
        unsafe { (end as *mut u64).write(0) };
        keep!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37);
        const { assert!(PENDING_WORDS == 38) };
        chorba.state()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(n: usize, seed: u64) -> Vec<u8> {
        let mut rng = fastrand::Rng::with_seed(seed);
        std::iter::repeat_with(|| rng.u8(..)).take(n).collect()
    }

    #[test]
    fn the_seed_is_eight_bytes_of_ones() {
        assert_eq!(update(!0, &[0xff; 8]), SEED);
    }

    #[test]
    fn tables_agree_with_zlib() {
        for n in 0..300 {
            let data = random(n, n as u64);
            assert_eq!(!update(!0, &data), crc32fast::hash(&data), "length {n}");
        }
        let data: [u8; 23] = random(23, 7).try_into().unwrap();
        assert_eq!(update_array(!0, &data), update(!0, &data));
    }

    #[test]
    fn shift_appends_zeros() {
        for len in (0..=crate::abi::MAX_MTU).step_by(4).chain([4092]) {
            let zeros = vec![0; len];
            for state in [1, 0x8000_0000, 0xdead_beef] {
                assert_eq!(shift(state, len), update(state, &zeros), "{len} bytes");
            }
        }
    }

    #[test]
    fn chorba_agrees_with_tables() {
        for cells in 1..=8 {
            let data = random(cells * 256, cells as u64);
            let word = |i: usize| u64::from_le_bytes(data[i * 8..][..8].try_into().unwrap());
            let mut c = Chorba::new(0x1234_5678);
            assert_eq!(c.state(), 0x1234_5678);
            for cell in 0..cells {
                c.cell(|i| word(cell * CELL_WORDS + i));
            }
            let state = c.state();
            assert_eq!(state, update(0x1234_5678, &data), "{cells} cells");
        }
    }

    #[test]
    fn lagged_agrees_with_tables() {
        let mut lagged = Lagged::NEW;
        // The longest first: what it leaves behind must not show in those that follow.
        for len in (512..=crate::abi::MAX_MTU).rev().step_by(64) {
            let data = random(40 + len, len as u64);
            let word = |i: usize| u64::from_le_bytes(data[i * 8..][..8].try_into().unwrap());
            let (groups, last) = (len % 256, len - 512);
            // SAFETY: it is this test's own, and no payload is longer.
            let state = unsafe {
                Lagged::headers(&mut lagged, 0x1234_5678, word);
                for at in (0..groups).step_by(64) {
                    Lagged::group(&mut lagged, at, |i| word(5 + at / 8 + i));
                }
                for at in (groups..last).step_by(256) {
                    Lagged::cell(&mut lagged, at, |i| word(5 + at / 8 + i));
                }
                Lagged::last(&mut lagged, last, |i| word(5 + last / 8 + i))
            };
            assert_eq!(state, update(0x1234_5678, &data), "{len} bytes");
        }
    }

    #[test]
    fn the_mask_of_words_is_that_of_headers() {
        let packet: Vec<u8> = random(40, 9);
        let state = packet
            .as_chunks::<8>()
            .0
            .iter()
            .zip(HEADER_MASK_V4)
            .fold(SEED, |state, (w, ones)| step8(state, u64::from_le_bytes(*w) | ones));
        assert_eq!(Some(state), headers(packet.as_slice(), L3::V4, 0, 0));
    }

    #[test]
    fn a_patch_is_a_recomputation() {
        let mut data = random(512, 3);
        let before = !update(SEED, &data);
        let old = u32::from_le_bytes(data[100..104].try_into().unwrap());
        let new = old ^ 0x00ff_1234;
        data[100..104].copy_from_slice(&new.to_le_bytes());
        assert_eq!(patch(before, old, new, 512 - 104), !update(SEED, &data));
    }

    #[test]
    fn parts_combine_linearly() {
        let (head, payload) = (random(52, 1), random(1024, 2));
        let whole = update(update(SEED, &head), &payload);
        assert_eq!(shift(update(SEED, &head), payload.len()) ^ update(0, &payload), whole);
    }
}
